#!/usr/bin/env bash
# Builds the fuzz targets (clang's libFuzzer) and runs each for CISTRON_FUZZ_SECONDS (default 60), as many at
# once as there are processors. Each starts from tests/fuzz/<target without _fuzz>/, which keeps the cases that were
# found; an input that fails is left in build/fuzz/failures/.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
seconds=${CISTRON_FUZZ_SECONDS:-60}
cmake --preset fuzz >/dev/null
cmake --build build/fuzz -j "$jobs" --target fuzzers
mkdir -p build/fuzz/failures build/fuzz/corpus

shopt -s nullglob
targets=(build/fuzz/fuzz/*)
if [[ ${#targets[@]} -eq 0 ]]; then
  echo "fuzz: no fuzz target was built" >&2
  exit 1
fi
run_one() {
  local name new old
  name=$(basename "$1")
  new=build/fuzz/corpus/$name
  old=tests/fuzz/${name%_fuzz}
  mkdir -p "$new"
  local corpora=("$new")
  [[ -d $old ]] && corpora+=("$old")
  if "$1" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -print_final_stats=0 \
       -artifact_prefix="build/fuzz/failures/$name-" "${corpora[@]}" >"build/fuzz/$name.log" 2>&1; then
    echo "fuzz: $name: $(grep -oE 'Done [0-9]+ runs in [0-9]+ second' "build/fuzz/$name.log")s, corpus $(ls "$new" | wc -l)"
  else
    tail -40 "build/fuzz/$name.log"
    echo "fuzz: $name failed; the input is build/fuzz/failures/$name-*"
    return 1
  fi
}
pids=()
failed=0
for target in "${targets[@]}"; do
  while (($(jobs -rp | wc -l) >= jobs)); do sleep 1; done
  run_one "$target" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit "$failed"
