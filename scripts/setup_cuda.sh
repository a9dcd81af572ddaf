#!/usr/bin/env bash
# Prints the folder of a CUDA 13.0 toolkit that can build the `cuda` preset, and makes one where there is none.
#
# An installed toolkit is used as it is (CUDA_HOME, nvcc in PATH, /usr/local/cuda). Otherwise compiler, headers and
# libraries come from NVIDIA's Python wheels, in the versions below, into build/cuda-toolkit (0.9 GB); that needs python3
# with venv and pip, and no rights. No GPU is needed to build.
#
# Headers of cudnn-frontend, which no toolkit has, come from their wheel into build/cudnn (12 MB to fetch), and those of
# cuDNN with its libraries where the toolkit lacks them (370 MB). Without them the backend is built without cuDNN.
# NCCL's header comes from its wheel into build/nccl where neither the toolkit nor the system has it (195 MB, with the
# library, which a run of several GPUs needs). Without it several ranks train on CPUs alone.
#
#   toolkit=$(scripts/setup_cuda.sh) && cmake --preset cuda -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc"
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=13.0
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
        nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.0.2.14)
cudnn_frontend=nvidia-cudnn-frontend==1.32.0
cudnn=nvidia-cudnn-cu13==9.19.0.56
nccl=nvidia-nccl-cu13==2.28.9

# take_wheels FOLDER WITHOUT WHEEL…: the wheels, unpacked into FOLDER; WITHOUT says what it means that they cannot be had.
take_wheels() {
  local folder=$1 without=$2
  shift 2
  echo "setup_cuda: taking $* from Python wheels into $folder" >&2
  # Timeouts are short, because a machine without a network builds too.
  python3 -m venv build/cudnn-venv >&2 &&
    build/cudnn-venv/bin/pip install --quiet --disable-pip-version-check --no-deps --timeout 10 --retries 1 \
      --target "$folder" --upgrade "$@" >&2 ||
    echo "setup_cuda: that failed; $without" >&2
}

# take_cudnn TOOLKIT: what CMake looks for in build/cudnn (cmake/CistronCuda.cmake).
take_cudnn() {
  local wanted_wheels=()
  [[ -e build/cudnn/include/cudnn_frontend.h ]] || wanted_wheels+=("$cudnn_frontend")
  [[ -e "$1/include/cudnn.h" || -e build/cudnn/nvidia/cudnn/include/cudnn.h ]] || wanted_wheels+=("$cudnn")
  (( ${#wanted_wheels[@]} )) || return 0
  take_wheels build/cudnn "the backend is built without cuDNN, and attention runs its other kernels" \
    "${wanted_wheels[@]}"
}

# take_nccl TOOLKIT: the header, where CMake looks for it.
take_nccl() {
  local folder
  for folder in "$1/include" /usr/include /usr/local/include build/nccl/nvidia/nccl/include; do
    [[ ! -e "$folder/nccl.h" ]] || return 0
  done
  take_wheels build/nccl "the backend is built without NCCL, and several ranks train on CPUs alone" "$nccl"
}

has_nvcc() { [[ -x "$1/bin/nvcc" ]] && "$1/bin/nvcc" --version | grep -q "release $wanted"; }

for candidate in "${CUDA_HOME:-}" "$(dirname "$(dirname "$(command -v nvcc || echo /none/none)")")" /usr/local/cuda; do
  if [[ -n "$candidate" ]] && has_nvcc "$candidate"; then
    take_cudnn "$candidate"
    take_nccl "$candidate"
    echo "$candidate"
    exit 0
  fi
done

venv=build/cuda-toolkit
if ! compgen -G "$venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc" >/dev/null; then
  echo "setup_cuda: no CUDA $wanted toolkit is installed; taking it from Python wheels into $venv" >&2
  python3 -m venv "$venv" >&2
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "${wheels[@]}" >&2
fi
root=$(cd "$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)" && pwd)
# As CMake and linkers expect them: lib64, and libraries without their version.
[[ -e "$root/lib64" ]] || ln -s lib "$root/lib64"
for library in "$root"/lib/lib*.so.*; do
  plain=${library%%.so.*}.so
  [[ -e "$plain" ]] || ln -s "$(basename "$library")" "$plain"
done
if ! has_nvcc "$root"; then
  echo "setup_cuda: $root/bin/nvcc does not run; remove $venv and try again" >&2
  exit 1
fi
take_cudnn "$root"
take_nccl "$root"
echo "$root"
