#!/usr/bin/env bash
# Make .venv and install what it needs from the locks, every package by its hash.
#   requirements/install.sh controller [PYTHON]     the controller and this project
#   requirements/install.sh test                    what the tests need on top
set -euo pipefail
cd "$(dirname "$0")/.."

# Why it ends early, in one sentence; make keeps it in a file, to end with it.
refuse() { # SENTENCE
    echo "$1" >&2
    keep_cause "$1"
    exit 1
}

keep_cause() { # SENTENCE
    if [ -n "${KVTRIAL_CAUSE_FILE:-}" ] && [ ! -s "$KVTRIAL_CAUSE_FILE" ]; then echo "$1" >"$KVTRIAL_CAUSE_FILE"; fi
}

ended() { # STATUS
    if [ "$1" -ne 0 ]; then keep_cause "The packages could not be installed into .venv (status $1); the lines above say why."; fi
}
trap 'ended $?' EXIT

# A name on PATH may be a shim that doesn't run, so each is tried.
find_python() {
    local name
    for name in python3.11 python3.12 python3.13; do
        if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    refuse "No Python 3.11, 3.12 or 3.13 with its venv module was found; install python3.11 and python3.11-venv."
}

lock_of() { # KIND PYTHON
    local version
    version=$("$2" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        refuse "PYTHON=$2 does not run here; give Python 3.11, 3.12 or 3.13: make setup PYTHON=python3.11"
    case $version in
    3.11) echo "requirements/$1-py311.txt" ;;
    3.12 | 3.13) echo "requirements/$1-py312.txt" ;;
    *) refuse "$2 is Python $version; give Python 3.11, 3.12 or 3.13: make setup PYTHON=python3.11" ;;
    esac
    "$2" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        refuse "PYTHON=$2 has no venv module with pip; install the package python$version-venv, or give another Python."
}

pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

controller() {
    local python=${1:-} lock
    [ -n "$python" ] || python=$(find_python)
    lock=$(lock_of controller "$python")
    echo "Installing the controller into .venv from $lock"
    "$python" -m venv --clear .venv
    pip install --require-hashes --only-binary=:all: -r "$lock"
    pip install --no-deps --no-build-isolation --editable .
    touch .venv/setup-done
}

tests() {
    local lock
    lock=$(lock_of test .venv/bin/python)
    echo "Installing what the tests need into .venv from $lock"
    pip install --require-hashes --only-binary=:all: -r "$lock"
    touch .venv/test-done
}

case ${1:-} in
controller) controller "${2:-}" ;;
test) tests ;;
*)
    sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
