// The rotary angles that all layers of a model share.
#pragma once

#include <vector>

#include "cistron/ops/context.h"
#include "cistron/tensor/tensor.h"

namespace cistron::nn {

// ops::RopeTable for as many positions as were needed so far: a model that is trained on short
// sequences does not hold the angles of the longest that it is said to take. An entry depends on
// its position alone, so growing changes no value. One thread at a time.
class RotaryTable {
 public:
  RotaryTable(std::int64_t head_dim, double theta, DType compute_type)
      : head_dim_(head_dim), theta_(theta), compute_type_(compute_type) {}

  // Table of at least `positions` rows, at most twice as many. A table handed out before stays
  // valid.
  Tensor ForPositions(const ops::Context& ctx, std::int64_t positions);

 private:
  std::int64_t head_dim_;
  double theta_;
  DType compute_type_;
  Tensor table_;
  std::vector<Tensor> outgrown_;  // captured steps may read them still
};

}  // namespace cistron::nn
