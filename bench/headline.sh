#!/usr/bin/env bash
# The headline run: checks, then the training step of Mixtral-8x7B beside its peers, one table, in one call of less
# than ten minutes. docs/benchmarks.md ("Headline run") says what it measures; bench/headline/headline.py does it.
#
#   bench/headline.sh --ranks 8                          eight GPUs; 4 and 2 take fewer layers. Builds the preset `cuda`
#   bench/headline.sh --ranks 8 --installed              the same with the cistron in $CISTRON_BIN, nothing is built
#   bench/headline.sh --ranks 2 --device cpu             a tiny model on processes; --start threads: on threads
#   bench/headline.sh --help                             all options
#
#   PYTHON    the interpreter (default python3); with torch and transformers it runs the peers too
set -euo pipefail
cd "$(dirname "$0")/.."
arguments=() installed=0 device=cuda previous=
for argument in "$@"; do
  [[ $previous == --device ]] && device=$argument
  case $argument in
    --device=*) device=${argument#*=} ;;
    --installed) installed=1; continue ;;
  esac
  arguments+=("$argument")
  previous=$argument
done

if [[ " $* " == *" --help "* ]]; then
  program=none
elif ((installed)); then
  program=${CISTRON_BIN:?headline: --installed needs CISTRON_BIN, the folder of cistron}/cistron
elif [[ $device == cuda ]]; then
  if ! command -v nvidia-smi >/dev/null && ! ls /dev/nvidia0 >/dev/null 2>&1; then
    echo "headline: no GPU here; --device cpu runs the same pieces with a tiny model" >&2
    exit 2
  fi
  echo "headline: building build/cuda/bin/cistron where it is not up to date" >&2
  toolkit=$(scripts/setup_cuda.sh)
  cmake --preset cuda -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" >/dev/null
  cmake --build build/cuda --target cistron >/dev/null
  program=build/cuda/bin/cistron
else
  echo "headline: building build/release/bin/cistron where it is not up to date" >&2
  cmake --preset release >/dev/null
  cmake --build build/release --target cistron >/dev/null
  program=build/release/bin/cistron
fi
if [[ $program != none && $device == cuda ]] && ! "$program" info | grep 'cuda:0' >/dev/null; then
  echo "headline: no GPU: $("$program" info | grep '^CUDA')" >&2
  exit 2
fi
exec "${PYTHON:-python3}" bench/headline/headline.py --program "$program" "${arguments[@]}"
