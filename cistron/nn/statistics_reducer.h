// Sums of statistics over all ranks: counts and score sums of the router, loss sums.
#pragma once

#include <span>

#include "cistron/tensor/tensor.h"

namespace cistron::nn {

class StatisticsReducer {
 public:
  virtual ~StatisticsReducer() = default;
  // Each in place, over all ranks and in one exchange; i64 or f64, contiguous. The bits are the
  // same on every rank.
  virtual void Sum(std::span<const Tensor> tensors) = 0;
};

// One rank: every sum is there already.
class LocalStatisticsReducer final : public StatisticsReducer {
 public:
  void Sum(std::span<const Tensor>) override {}
};

}  // namespace cistron::nn
