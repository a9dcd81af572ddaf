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
  scripts/setup_cuda.sh >/dev/null
  cmake --preset cuda >/dev/null
  cmake --build build/cuda --target cistron >/dev/null
  program=build/cuda/bin/cistron
else
  cmake --preset release >/dev/null
  cmake --build build/release --target cistron >/dev/null
  program=build/release/bin/cistron
fi
exec "${PYTHON:-python3}" bench/headline/headline.py --program "$program" "${arguments[@]}"
