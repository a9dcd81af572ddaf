#!/usr/bin/env bash
# Every test of the CUDA backend, on this machine's GPU: builds what is missing and fails where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build_cuda.sh
if ! build/cuda/bin/cistron info | grep -q 'cuda:0'; then
  echo "test_cuda: no GPU: $(build/cuda/bin/cistron info | grep '^CUDA')" >&2
  exit 1
fi
for folder in tests/golden/*/; do
  for precision in fp32 bf16; do
    build/cuda/bin/cistron verify "$folder" --device cuda --precision "$precision"
  done
done
