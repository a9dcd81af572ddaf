// Sums of statistics over all ranks: counts and score sums of the router, loss sums.
#pragma once

#include "cistron/tensor/tensor.h"

namespace cistron::nn {

class StatisticsReducer {
 public:
  virtual ~StatisticsReducer() = default;
  // In place, over all ranks; i64 or f64.
  virtual void Sum(const Tensor& t) = 0;
};

// One rank: every sum is there already.
class LocalStatisticsReducer final : public StatisticsReducer {
 public:
  void Sum(const Tensor&) override {}
};

}  // namespace cistron::nn
