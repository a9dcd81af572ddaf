#!/usr/bin/env bash
# Checks the formatting of all C++ files; `scripts/format.sh --fix` formats them.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(--dry-run --Werror)
[[ "${1:-}" == --fix ]] && mode=(-i)
command -v clang-format >/dev/null || { echo "format: clang-format is not installed; run scripts/install_deps.sh --developer" >&2; exit 1; }
git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format "${mode[@]}"
echo "format: $(git ls-files -- '*.h' '*.cc' '*.cu' '*.cuh' | wc -l) files"
