#!/usr/bin/env bash
# Pack an engine for a machine without any package index, as an unpacked tree in pieces.
#   requirements/pack_tree.sh LOCK OUTPUT_DIRECTORY [PIECE_BYTES]
# LOCK: a hash-locked requirements file, such as requirements/engine-vllm-cuda-0.26.0-beside-torch-py312.txt (that engine
# beside an image that has torch 2.11.0). Needs CPython 3.12 on x86_64 (PYTHON names another), the network, strip and xz,
# and 2 GB below TMPDIR. There:
#   cat PIECE... | tar -xJf - -C DIRECTORY
#   python3 roles/vllm/files/make_tree.py DIRECTORY/tree      makes bin/vllm and bin/python in it
# and in the inventory: vllm_existing_venv: DIRECTORY/tree
#
# Left out, and not needed for a dense bf16 model on Hopper: FlashAttention 2, FlashMLA, MoE and other kernels of their
# own, vLLM's Rust front end, data of mistral's tokenizers and of countries.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4s/^# \{0,1\}//p' "$0" >&2; exit 2; }
lock=$1 output=$(realpath -m "$2") piece=${3:-60000000}
python=${PYTHON:-python3.12}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "$python is not Python 3.12; set PYTHON" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/tree/lib/python3.12/site-packages
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps --no-compile \
    --only-binary=:all: ${WHEELS:+--no-index --find-links "$WHEELS"} --target "$site" -r "$lock"
cd "$site"
rm -rf vllm/third_party/{deep_gemm,fmha_sm100} vllm/vllm-rs vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so \
    vllm/_flashmla_C* vllm/_qutlass_C* vllm/_moe_C* mistral_common/data pycountry/locales bin
[ ! -e vllm/_C_stable_libtorch.abi3.so ] || strip --strip-unneeded vllm/_C_stable_libtorch.abi3.so
find . -name __pycache__ -prune -exec rm -rf {} +
mkdir -p "$output"
rm -f "$output"/piece.*
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf - tree | xz -6 | split -b "$piece" -d - "$output/piece."
ls -l "$output"
