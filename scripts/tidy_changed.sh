#!/usr/bin/env bash
# clang-tidy on the source files that changed since a commit.
#
#   scripts/tidy_changed.sh [BASE]      BASE: default the merge base with main, or the commit before
#   scripts/tidy_changed.sh --all [DIR…]  every source file (below DIR), without a limit of time: tens of minutes
#   CISTRON_TIDY_JOBS                   files at a time, default all processors
#   CISTRON_TIDY_BUILD                  folder with compile_commands.json, default build/dev
#   CISTRON_TIDY_SECONDS                no new file is begun after this time, default 240; what was left out
#                                       is said. A changed header is checked through the sources that changed.
# Fails on any finding: .clang-tidy lists only checks that are enforced.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${CISTRON_TIDY_BUILD:-build/dev}
seconds=${CISTRON_TIDY_SECONDS:-240}
jobs=${CISTRON_TIDY_JOBS:-$(nproc)}
command -v clang-tidy >/dev/null || { echo "tidy: clang-tidy is not installed; run scripts/install_deps.sh --developer" >&2; exit 1; }
[[ -f $build/compile_commands.json ]] || { echo "tidy: no $build/compile_commands.json; run 'cmake --preset dev'" >&2; exit 1; }

base=
list_files() { git diff --name-only --diff-filter=d "$base" -- '*.cc'; }
if [[ ${1:-} == --all ]]; then
  shift
  seconds=${CISTRON_TIDY_SECONDS:-86400}
  list_files() { git ls-files -- "${@:-.}" | grep '\.cc$'; }
elif [[ $# -ge 1 ]]; then
  base=$1
else
  base=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
  # On main itself: what the last commit changed.
  [[ $base == "$(git rev-parse HEAD)" ]] && base=$(git rev-parse -q --verify 'HEAD~1' || git hash-object -t tree /dev/null)
fi
# Only files that are compiled; the newest first, so that a short budget sees what was just written.
mapfile -t files < <(list_files "$@" | while read -r f; do
  grep -q "\"file\": \".*/$f\"" "$build/compile_commands.json" && echo "$f"; done)
echo "tidy: ${#files[@]} files${base:+ changed since ${base:0:12}}"
[[ ${#files[@]} -eq 0 ]] && exit 0

end=$((SECONDS + seconds))
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
check() {  # file log
  # OpenMP pragmas need no runtime here, and g++'s flags are not all clang's.
  clang-tidy --quiet -p "$build" --extra-arg=-Wno-unknown-warning-option \
             --extra-arg=-Wno-ignored-optimization-argument "$1" >"$2" 2>"$2.err" || echo "$1" >>"$logs/failed"
}
left=0
for i in "${!files[@]}"; do
  if ((SECONDS >= end)); then left=$((${#files[@]} - i)); break; fi
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n || true; done
  check "${files[$i]}" "$logs/$i" &
done
wait
cat "$logs"/[0-9]* 2>/dev/null | grep -E "^/.*(warning|error):" | sort -u | sed "s|$PWD/||" || true
if ((left > 0)); then echo "tidy: time is up, $left files were not checked"; fi
if [[ -s $logs/failed ]]; then
  echo "tidy: findings in $(wc -l <"$logs/failed") files"
  exit 1
fi
echo "tidy: clean"
