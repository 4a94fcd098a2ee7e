#!/usr/bin/env bash
# Run the checks and tests and print a table of stages. Fails if any stage fails. What each test took: .kvtrial/tests/*.xml.
#   tests/run.sh          what a change has to pass
#   tests/run.sh full     the long ones too (marked "full")
#
# Two lanes of stages go side by side, since most of their time is waiting; the test hosts and the real engine come after
# them, alone. Each lane has processes, a temporary folder and /dev/shm of its own (where this user may have them): the host
# program refuses to measure beside an engine that isn't its own, and would meet the other lane's.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
selection="not full"
[ "${1:-}" = full ] && selection=""
export selection
mkdir -p .kvtrial/tests
rm -f .kvtrial/tests/* .kvtrial/installed
export TABLE=.kvtrial/tests/table

stage() { # NAME COMMAND...
    local name=$1 started=$SECONDS result=passed
    export STAGE=$name
    shift
    printf '\n== %s\n' "$name"
    "$@" || result=FAILED
    printf '%-10s %-7s %4d s\n' "$name" "$result" $((SECONDS - started)) >>"$TABLE"
}

tests() { # ARGUMENTS of pytest
    for venv in .kvtrial/venvs/vllm-*/; do
        [ -x "${venv}bin/vllm" ] && export KVTRIAL_ENGINE_VENV=$PWD/${venv%/}
    done
    python -m pytest -q --durations=5 --junitxml=".kvtrial/tests/$STAGE.xml" "$@"
}

engine_installed() {
    until [ -f .kvtrial/installed ]; do sleep 1; done
    [ "$(cat .kvtrial/installed)" = 0 ] || { tail -n 5 .kvtrial/install.log; return 1; }
}

host_lane() {
    stage host tests -m "$selection" tests/host
    stage unit tests -m "$selection" tests/unit
    stage install engine_installed
    stage engine tests -m "$selection" tests/engine
}

playbook_lane() {
    stage lint tests/lint.sh
    stage ansible tests -m "$selection" tests/ansible
    engine_installed >/dev/null
    stage playbooks tests -m "${selection:+$selection and }not e2e_real" tests/e2e
}

own_world() { # COMMAND: run it with processes, a temporary folder and /dev/shm of its own
    local folder status
    folder=$(mktemp -d)
    TMPDIR=$folder unshare --fork --kill-child --pid --mount --mount-proc \
        bash -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' - "$@"
    status=$?
    rm -rf "$folder"
    return $status
}

export -f stage tests engine_installed host_lane playbook_lane

# First, since beside other stages nothing would be measured.
stage bench env PYTHONPATH=tests python -m bench.client --quick

# Installing the engine is minutes of download: it goes on beside the stages that don't need it.
(
    ansible-playbook tests/install_engine.yml >.kvtrial/install.log 2>&1
    echo $? >.kvtrial/tests/installed && mv .kvtrial/tests/installed .kvtrial/installed
) &

if own_world true 2>/dev/null; then
    own_world bash -c host_lane >.kvtrial/tests/host.log 2>&1 &
    own_world bash -c playbook_lane
    wait
    cat .kvtrial/tests/host.log
else
    host_lane
    playbook_lane
    wait
fi
stage fleet tests -m "$selection" tests/fleet
stage e2e tests -m "${selection:+$selection and }e2e_real" tests/e2e

printf '\n'
cat "$TABLE"
! grep -q FAILED "$TABLE"
