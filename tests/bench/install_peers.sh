#!/usr/bin/env bash
# Install guidellm and aiperf for the benchmark, each into a venv of its own from its lock, below .kvtrial/bench/.
# One that can't be installed is no failure: PEER.reason says why, and its rows in the result are empty with that reason.
set -uo pipefail
cd "$(dirname "$0")/../.."
bench=$PWD/.kvtrial/bench
mkdir -p "$bench"

python=
for name in .venv/bin/python python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
        python=$name
        break
    fi
done

install() { # PEER
    local lock=requirements/bench-$1-py311.txt venv=$bench/$1 wanted log=$bench/$1.log
    wanted=$(sha256sum "$lock" | cut -d ' ' -f 1)
    [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ] && return
    rm -f "$bench/$1.reason"
    if [ -z "$python" ]; then
        echo "its lock is for Python 3.11, and none is here" >"$bench/$1.reason"
        return
    fi
    echo "Installing $1 into .kvtrial/bench/$1 from $lock"
    "$python" -m venv --clear "$venv" || return
    # The CPU build of torch is on PyTorch's own index; that is asked only where pip is not configured for it.
    if "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes -r "$lock" >"$log" 2>&1 ||
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes \
            --extra-index-url https://download.pytorch.org/whl/cpu -r "$lock" >"$log" 2>&1; then
        echo "$wanted" >"$venv/installed"
    else
        rm -rf "$venv"
        echo "it could not be installed: $(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-200)" >"$bench/$1.reason"
    fi
}

for peer in guidellm aiperf; do install "$peer"; done

# `vllm bench serve` and the tokenizer come with the engine.
if ! compgen -G '.kvtrial/venvs/vllm-*/kvtrial-installed.json' >/dev/null; then
    .venv/bin/ansible-playbook tests/install_engine.yml >"$bench/engine.log" 2>&1 ||
        echo "The engine could not be installed; the end of .kvtrial/bench/engine.log says why." >&2
fi
exit 0
