#!/usr/bin/env bash
# The whole training step of Cistron beside Hugging Face's, alternating, on an idle machine: JSON lines.
#
#   bench/training_step.sh [PYTHON]     PYTHON: an interpreter that has torch and transformers (default python3)
#   CISTRON_BENCH_ROUNDS                how often each is measured, default 2
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
cistron=build/release/bin/cistron
[[ -x $cistron ]] || { echo "training_step: $cistron is missing; run 'make build'" >&2; exit 1; }
"$python" -c 'import torch, transformers' || { echo "training_step: $python lacks torch or transformers" >&2; exit 1; }
grep -m1 'model name' /proc/cpuinfo
for model in small wide fine; do
  for ((round = 0; round < ${CISTRON_BENCH_ROUNDS:-2}; ++round)); do
    for experts in eager grouped_mm; do
      "$python" -W ignore bench/peer_mixtral.py --model "$model" --experts "$experts"
    done
    "$cistron" bench --model "$model"
    # Native bf16 products exist on some processors only; elsewhere this line shows what widening costs.
    "$cistron" bench --model "$model" --precision bf16
  done
done
