// How many sequences a micro-batch may have: bounds that a run knows before it reads. Pure
// arithmetic.
#pragma once

#include <cstdint>

namespace cistron::data {

// Lengths of the windows of a stream, each as often as the stream draws it.
struct WindowLengths {
  std::int64_t shortest = 0, longest = 0;
  double mean = 0, variance = 0;
};

// Sums the lengths of windows.
class WindowLengthSums {
 public:
  // `weight` > 0: how often windows of `length` ≥ 1 tokens are drawn.
  void Add(std::int64_t length, double weight);
  // All 0 where nothing was added.
  WindowLengths Lengths() const;

 private:
  WindowLengths lengths_;
  double weight_ = 0, sum_ = 0, squares_ = 0;
};

// Sequences that `rows` rows of `row_tokens` tokens, one after another, are cut into by windows in
// random order, at most. k windows have k·mean tokens with a standard deviation of √(k·variance):
// k is the number that fills the tokens even six deviations below, which by the central limit
// theorem one micro-batch in 10⁹ exceeds; each row may cut one window more. Where the shortest
// window, or single tokens, allow fewer sequences, as many as they allow.
std::int64_t SequencesBound(const WindowLengths& windows, std::int64_t rows,
                            std::int64_t row_tokens);

}  // namespace cistron::data
