#!/usr/bin/env bash
# One process with two threads beside two ranks (dp 1, ep 2), as threads and as processes, that train the same global
# batch; alternating, on an idle machine of two cores or more. JSON lines, then a table: the median of the rounds, and
# the ratio of tokens a second to the one process's of the same round (the goal is 0.90).
#
#   bench/ranks_cpu.sh [MODEL]          a shape of `cistron bench`, default wide
#   CISTRON_BENCH_ROUNDS                how often each is measured, default 5
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-wide}
bench=build/bench/bench/ranks_cpu_bench
[[ -x $bench ]] || {
  echo "ranks_cpu: $bench is missing; run: cmake --preset bench && cmake --build build/bench --target ranks_cpu_bench" >&2
  exit 1
}
command -v mpirun >/dev/null || { echo "ranks_cpu: mpirun is missing (Debian: openmpi-bin)" >&2; exit 1; }
# As the program sets it (docs/decisions/0011-idle-threads.md); mpirun refuses root, who containers run as, unless told.
export GOMP_SPINCOUNT=10000 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
grep -m1 'model name' /proc/cpuinfo
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for ((round = 0; round < ${CISTRON_BENCH_ROUNDS:-5}; ++round)); do
  OMP_NUM_THREADS=2 "$bench" "$model" 1 | tee -a "$lines"
  OMP_NUM_THREADS=2 "$bench" "$model" 2 | tee -a "$lines"
  OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core "$bench" "$model" 2 | tee -a "$lines"
done
python3 - "$lines" <<'TABLE'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rounds = {}
for row in rows:
    rounds.setdefault(row["transport"], []).append(row)
one = rounds[rows[0]["transport"]]
print(f'{"":<24}{"tokens/s":>10}{"ms":>9}{"cpu ms":>9}{"ratio":>8}{"least":>8}{"most":>8}')
names = {"inproc": "two ranks, threads", "mpi": "two ranks, processes"}
for transport, measured in rounds.items():
    ratios = [m["tokens_per_s"] / o["tokens_per_s"] for m, o in zip(measured, one)]
    median = lambda key: statistics.median(m[key] for m in measured)
    print(f'{names.get(transport, "one process"):<24}{median("tokens_per_s"):>10.0f}{median("ms"):>9.1f}'
          f'{median("cpu_ms"):>9.1f}{statistics.median(ratios):>8.3f}{min(ratios):>8.3f}{max(ratios):>8.3f}')
TABLE
