#!/usr/bin/env bash
# Run the checks and tests, the quick ones first, and print a table of stages. Fails if any stage fails.
#   tests/run.sh          what a change has to pass
#   tests/run.sh full     the long ones too (marked "full")
set -uo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
selection="not full"
[ "${1:-}" = full ] && selection=""
failed=0
table=()

stage() { # NAME COMMAND...
    local name=$1 started=$SECONDS result=passed
    shift
    printf '\n== %s\n' "$name"
    "$@" || { result=FAILED failed=1; }
    table+=("$(printf '%-10s %-7s %4d s' "$name" "$result" $((SECONDS - started)))")
}

# Installing the engine is minutes of download: it goes on beside the stages that don't need it.
mkdir -p .kvtrial
ansible-playbook tests/install_engine.yml >.kvtrial/install.log 2>&1 &
install=$!

stage lint tests/lint.sh
# Each folder by itself: a stage's failure must not hide the next one. e2e installs the engine that the stage engine uses.
for folder in unit host ansible fleet e2e engine; do
    if [ "$folder" = e2e ]; then
        stage install wait $install
        [ "$failed" = 0 ] || tail -n 5 .kvtrial/install.log
    fi
    for venv in .kvtrial/venvs/vllm-*/; do
        [ -x "${venv}bin/vllm" ] && export KVTRIAL_ENGINE_VENV=$PWD/${venv%/}
    done
    if compgen -G "tests/$folder/**/test_*.py" >/dev/null || compgen -G "tests/$folder/test_*.py" >/dev/null; then
        stage "$folder" python -m pytest -q --durations=5 -m "$selection" "tests/$folder"
    fi
done

printf '\n'
printf '%s\n' "${table[@]}"
exit $failed
