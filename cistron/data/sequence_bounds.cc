#include "cistron/data/sequence_bounds.h"

#include <algorithm>
#include <cmath>

#include "cistron/base/error.h"

namespace cistron::data {

void WindowLengthSums::Add(std::int64_t length, double weight) {
  CISTRON_CHECK(length >= 1 && weight > 0, "WindowLengthSums: length {} of weight {}", length,
                weight);
  lengths_.shortest = weight_ > 0 ? std::min(lengths_.shortest, length) : length;
  lengths_.longest = std::max(lengths_.longest, length);
  const auto n = static_cast<double>(length);
  weight_ += weight;
  sum_ += weight * n;
  squares_ += weight * n * n;
}

WindowLengths WindowLengthSums::Lengths() const {
  WindowLengths lengths = lengths_;
  if (weight_ == 0) return lengths;
  lengths.mean = sum_ / weight_;
  lengths.variance = std::max(0.0, squares_ / weight_ - lengths.mean * lengths.mean);
  return lengths;
}

std::int64_t SequencesBound(const WindowLengths& windows, std::int64_t rows,
                            std::int64_t row_tokens) {
  CISTRON_CHECK(rows >= 1 && row_tokens >= 1 && windows.shortest >= 1,
                "SequencesBound: {} rows of {} tokens, windows of {} and more", rows, row_tokens,
                windows.shortest);
  constexpr double kDeviations = 6;
  const std::int64_t tokens = rows * row_tokens;
  // k·mean − kDeviations·√(k·variance) = tokens, solved for √k.
  const double spread = kDeviations * std::sqrt(windows.variance);
  const double root =
      (spread + std::sqrt(spread * spread + 4 * windows.mean * static_cast<double>(tokens))) /
      (2 * windows.mean);
  // Fewer than k whole windows; one that begins before them, one that ends behind, and one more at
  // each end of a row between.
  const auto whole =
      static_cast<std::int64_t>(std::min(std::ceil(root * root), static_cast<double>(tokens))) - 1;
  const std::int64_t possible = (tokens - 1) / windows.shortest;
  return std::min(std::min(whole, possible) + 2 + rows - 1, tokens);
}

}  // namespace cistron::data
