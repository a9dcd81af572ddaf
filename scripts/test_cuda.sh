#!/usr/bin/env bash
# Every test of the CUDA backend, on this machine's GPU: builds what is missing and fails where there is no GPU.
#
#   scripts/test_cuda.sh              tests with the label `cuda`, golden folders, failures of the program, and
#                                     compute-sanitizer on small cases where it is installed
#   scripts/test_cuda.sh --installed  the same with binaries that lie in $CISTRON_BIN (cistron and the tests), nothing is built
#
#   CISTRON_TEST_ONLY=racecheck       what has this in its name alone
#   CISTRON_TEST_JOBS=14              that many at once, where processors and device memory are enough
set -euo pipefail
cd "$(dirname "$0")/.."
report=$(mktemp)  # names of what failed
trap 'rm -f "$report"' EXIT
run() {  # NAME COMMAND …, a program or a function: prints the name and, when it fails, the end of the output
  [[ $1 == *"${CISTRON_TEST_ONLY:-}"* ]] || return 0
  while (($(jobs -rp | wc -l) >= ${CISTRON_TEST_JOBS:-1})); do wait -n || true; done
  check "$@" &
}
alone() {  # as run, with nothing beside it
  [[ $1 == *"${CISTRON_TEST_ONLY:-}"* ]] || return 0
  wait
  check "$@"
}
check() {
  local name=$1 log begin=$SECONDS
  shift
  log=$(mktemp)
  # A shell of its own: timeout starts programs alone.
  if timeout "${CISTRON_TEST_TIMEOUT:-900}" bash -c '"$@"' "$name" "$@" >"$log" 2>&1; then
    echo "ok      $name, $((SECONDS - begin)) s"
  else
    echo "FAILED  $name"$'\n'"$(tail -n 25 "$log")"  # at once: others print, too
    echo "$name" >>"$report"
  fi
  rm -f "$log"
}
# STATUS TEXT COMMAND …: fails unless the command exits so and says that.
refused() {
  local status=$1 text=$2 got=0 out
  shift 2
  out=$("$@" 2>&1) || got=$?
  [[ $got == "$status" && $out == *"$text"* ]] || { echo "exit status $got, expected $status and '$text': $out"; return 1; }
}
export -f refused

if [[ "${1:-}" == --installed ]]; then
  cistron=$CISTRON_BIN/cistron tests=$CISTRON_BIN
else
  scripts/build_cuda.sh
  cistron=build/cuda/bin/cistron tests=build/cuda/tests
fi
if ! "$cistron" info | grep -q 'cuda:0'; then
  echo "test_cuda: no GPU: $("$cistron" info | grep '^CUDA')" >&2
  exit 1
fi

# Small cases: a sanitizer makes kernels 10 to 100 times slower. First, since they take longest.
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
  small=(--error-exitcode 9 "$tests/device_traps_test" --gtest_filter=DeviceTraps.SecondBackwardNan)
  # What the copy engine (TMA) stores is not seen as written: initcheck is for kernels without it.
  plain=gemm=cuda,grouped_gemm=cuda,grouped_mlp=cuda,attention=cuda
  run "memcheck of three steps" "$sanitizer" --tool memcheck "${small[@]}"
  run "memcheck of three steps, plain kernels" env CISTRON_IMPL=$plain "$sanitizer" --tool memcheck "${small[@]}"
  # racecheck reports cuDNN's own kernels, whose order it does not see.
  run "racecheck of three steps" env CISTRON_IMPL=attention=cuda "$sanitizer" --tool racecheck "${small[@]}"
  for kernels in GroupedProducts FusedExperts Attention RmsNorm Permute; do
    run "racecheck of $kernels at training widths" "$sanitizer" --tool racecheck --error-exitcode 9 \
      "$tests/device_races_test" "--gtest_filter=DeviceRaces.$kernels"
  done
  run "initcheck of three steps, plain kernels" env CISTRON_IMPL=$plain "$sanitizer" --tool initcheck "${small[@]}"
else
  echo "test_cuda: compute-sanitizer is not installed: no check of memory, races and initialisation"
fi

# With --installed ctest is not there; otherwise build_cuda.sh ran all tests with the label already.
if [[ "${1:-}" == --installed ]]; then
  for test in "$tests"/*_test; do  # a _rank_test is what another test starts on several ranks
    [[ $test == *_rank_test || $test == */device_traps_test ]] || run "$(basename "$test")" "$test"
  done
  alone device_traps_test "$tests/device_traps_test"  # takes all memory of the GPU once
fi
for folder in tests/golden/*/; do
  for precision in fp32 bf16; do
    run "golden $(basename "$folder") $precision" "$cistron" verify "$folder" --device cuda --precision "$precision"
  done
done

# A run that begins on one device goes on on the other and back, from each other's checkpoints.
changes_device() {  # PRECISION
  local folder status=0
  folder=$(mktemp -d)
  for leg in cpu:2 cuda:4 cpu:6; do
    "$cistron" train --config-name L0_sanity "precision=$1" "output=$folder/run" run.on_exists=resume \
      batch.global_tokens=2048 optim.warmup_steps=0 "device=${leg%:*}" "train.steps=${leg#*:}" || { status=1; break; }
  done
  [[ $status != 0 || $(wc -l <"$folder/run/metrics.jsonl") == 6 ]] || { echo "not six steps"; status=1; }
  rm -rf "$folder"
  return $status
}
export -f changes_device
export cistron
for precision in fp32 bf16; do run "checkpoints from device to device, $precision" changes_device "$precision"; done

# Steps that are told op by op: the table is printed, and is part of the run and of its report.
profiles() {
  local folder status=0
  folder=$(mktemp -d)
  "$cistron" train --config-name L0_sanity device=cuda precision=bf16 "output=$folder/run" \
    data.train_fraction=0.998 train.steps=6 optim.warmup_steps=0 profile=steps:4-5 >"$folder/printed" || status=1
  "$cistron" report "$folder/run" >/dev/null || status=1
  for op in gemm attention norm router adamw; do
    for file in printed run/profile.txt run/report.html; do
      grep -q "^$op " "$folder/$file" || { echo "$file has no line of $op"; status=1; }
    done
  done
  cat "$folder/printed"
  rm -rf "$folder"
  return $status
}
export -f profiles
run "profile of two steps, in the report" profiles

# Token counts that were never seen, where the driver may not compile: kernels are in the program for any shape.
run "jit-stall without a compiler" env CUDA_DISABLE_PTX_JIT=1 CISTRON_IMPL=attention=flash \
  "$tests/device_traps_test" --gtest_filter=DeviceTraps.JitStall

# What a machine lacks is said in one message, exit status 2.
run "no GPU is shown" refused 2 "no GPU can be used" env CUDA_VISIBLE_DEVICES= "$cistron" bench --device cuda
run "too little memory" refused 2 "too little for the step" \
  "$cistron" train --config-name L0_sanity device=cuda precision=bf16 output="${TMPDIR:-/tmp}/cistron-too-large" \
  model.hidden_size=8192 model.num_attention_heads=64 model.num_key_value_heads=8 model.intermediate_size=65536 \
  model.num_hidden_layers=64
run "a plan that does not fit" refused 2 "does not fit" \
  "$cistron" plan --model 8x7b_4layers --precision bf16 --device cuda plan.memory_gib=64

wait
mapfile -t failed <"$report"
if ((${#failed[@]})); then
  printf 'test_cuda: %d failed:\n' "${#failed[@]}" >&2
  printf '  %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "test_cuda: all passed"
