#!/usr/bin/env bash
# Static checks of the Python code. Those of YAML and Ansible are tests in tests/ansible/.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
failed=0
ruff check . || failed=1
ruff format --check . || failed=1
mypy || failed=1
exit $failed
