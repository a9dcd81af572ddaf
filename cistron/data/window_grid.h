// How a stretch of tokens is covered by windows. Pure arithmetic.
#pragma once

#include <cstdint>

namespace cistron::data {

// A segment of n tokens (n ≥ 1) is covered by windows of min(n, length) tokens:
//   n ≤ length:  one window;
//   otherwise    m = ceil((n − length) / stride) + 1 windows, and one more where m ≥ kManyWindows,
//   so
//                that the grid can be shifted by any phase; window i starts at
//                clamp(i·stride − phase, 0, n − length), phase in [0, slack].
// With stride ≤ length every token lies in a window, whatever the phase; every window is full.
struct WindowGrid {
  std::int64_t length = 0;
  std::int64_t stride = 0;

  static constexpr std::int64_t kManyWindows = 16;

  std::int64_t Count(std::int64_t n) const {
    if (n <= length) return 1;
    const std::int64_t m = (n - length + stride - 1) / stride + 1;
    return m >= kManyWindows ? m + 1 : m;
  }
  // The largest phase.
  std::int64_t Slack(std::int64_t n) const {
    return n <= length ? 0 : (Count(n) - 1) * stride - (n - length);
  }
  std::int64_t Start(std::int64_t n, std::int64_t i, std::int64_t phase) const {
    const std::int64_t last = n <= length ? 0 : n - length;
    const std::int64_t start = i * stride - phase;
    return start < 0 ? 0 : start > last ? last : start;
  }
  std::int64_t Length(std::int64_t n) const { return n < length ? n : length; }
};

}  // namespace cistron::data
