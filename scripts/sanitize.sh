#!/usr/bin/env bash
# Builds and runs tests under sanitizers.
#
#   scripts/sanitize.sh asan   AddressSanitizer and UndefinedBehaviorSanitizer, all tests (g++)
#   scripts/sanitize.sh tsan   ThreadSanitizer, the tests with the label `threads` (clang with its OpenMP
#                              runtime, which reports its locks and barriers; oneDNN's own runtime does not, so
#                              tests that run it on several threads are left out)
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
case "${1:-}" in
  asan)
    cmake --preset asan >/dev/null
    cmake --build build/asan -j "$jobs"
    ctest --test-dir build/asan -j "$jobs" --output-on-failure
    ;;
  tsan)
    cmake --preset tsan >/dev/null
    cmake --build build/tsan -j "$jobs" --target threaded_tests
    # Archer tells ThreadSanitizer what OpenMP's barriers order.
    archer=$(find /usr/lib/llvm-*/lib -name libarcher.so 2>/dev/null | sort | tail -1)
    OMP_TOOL_LIBRARIES=$archer \
    TSAN_OPTIONS="allocator_may_return_null=1 ignore_noninstrumented_modules=1 halt_on_error=1" \
      ctest --test-dir build/tsan -j "$jobs" -L threads --output-on-failure --no-tests=error
    ;;
  *) echo "usage: scripts/sanitize.sh asan|tsan" >&2; exit 2 ;;
esac
