#!/usr/bin/env bash
# Trains preset L0_sanity on the genome in data/, evaluates, reports, and compares with Markov models.
# `make demo` builds the program first. A second run starts anew, in a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
cistron=build/release/bin/cistron
[[ -x $cistron ]] || { echo "demo: $cistron is missing; run 'make build'" >&2; exit 1; }
output=${CISTRON_DEMO_OUTPUT:-runs/L0_sanity}

"$cistron" train --config-name L0_sanity "output=$output" run.on_exists=new "$@"
# With on_exists=new an earlier run keeps its folder and the new one gets a number.
run=$(ls -td "$output" "$output"-[0-9]* 2>/dev/null | head -1)
"$cistron" report "$run"
"$cistron" baseline --run "$run"
