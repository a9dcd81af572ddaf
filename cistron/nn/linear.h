// Linear: y = x · wᵀ, weight [out, in], no bias.
#pragma once

#include <string>

#include "cistron/nn/parameter.h"
#include "cistron/ops/context.h"

namespace cistron::nn {

class Linear {
 public:
  Linear(ParameterStore& store, const std::string& name, std::int64_t out_features,
         std::int64_t in_features);

  // x [T, in] → y [T, out].
  void Forward(const ops::Context& ctx, const Tensor& x, const ops::Output& y) const;
  // dy [T, out], x as in forward; dx [T, in]. The weight gradient goes to the store.
  void Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& x,
                const ops::Output& dx) const;

  std::int64_t out_features() const { return out_features_; }
  std::int64_t in_features() const { return in_features_; }

 private:
  ParameterStore* store_;
  ParameterId weight_;
  std::int64_t out_features_, in_features_;
};

}  // namespace cistron::nn
