// The least, the mean and the largest of values that are seen one after another.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cistron::train {

struct ValueRange {
  double least = 1e300, sum = 0, most = 0;
  std::int64_t count = 0;

  void Add(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
    sum += value;
    ++count;
  }
  // 0 of none.
  double Mean() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

}  // namespace cistron::train
