#!/usr/bin/env bash
# Builds everything with the CUDA backend (no GPU needed) and runs the tests that carry the label `cuda`: on a machine
# without a GPU they test the CPU's side alone and say so.
#
#   scripts/build_cuda.sh          the preset `cuda`, for compute capability 9.0
#   scripts/build_cuda.sh --all    and the kernels for every supported architecture, to see that they compile
set -euo pipefail
cd "$(dirname "$0")/.."
JOBS=${JOBS:-$(nproc)}

toolkit=$(scripts/setup_cuda.sh)
echo "build_cuda: $("$toolkit/bin/nvcc" --version | grep release) in $toolkit"
cmake --preset cuda -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc"
cmake --build build/cuda -j "$JOBS" --target cistron cuda_tests
ctest --test-dir build/cuda -L '^cuda$' -j "$JOBS" --output-on-failure
if [[ "${1:-}" == --all ]]; then
  cmake --preset cuda -B build/cuda-all -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" \
        -DCISTRON_CUDA_ARCHITECTURES="80;90a;100a;120a" -DCISTRON_BUILD_TESTS=OFF
  cmake --build build/cuda-all -j "$JOBS" --target cistron_ops
fi
