#!/usr/bin/env bash
# Trains preset L0_sanity on the genome in data/, evaluates, writes the report and the model, and ends with the
# comparison against Markov models. `make demo` builds the program first. A second run starts anew.
# Arguments are passed on: scripts/demo.sh seed=2
set -euo pipefail
cd "$(dirname "$0")/.."
cistron=build/release/bin/cistron
[[ -x $cistron ]] || { echo "demo: $cistron is missing; run 'make build'" >&2; exit 1; }
exec "$cistron" train --config-name L0_sanity run.on_exists=new "$@"
