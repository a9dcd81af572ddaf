#include "cistron/nn/linear.h"

#include "cistron/ops/gemm/gemm.h"

namespace cistron::nn {

using ops::Transpose;

Linear::Linear(ParameterStore& store, const std::string& name, std::int64_t out_features,
               std::int64_t in_features)
    : store_(&store), out_features_(out_features), in_features_(in_features) {
  weight_ = store.Register({.name = name, .shape = {out_features, in_features}});
}

void Linear::Forward(const ops::Context& ctx, const Tensor& x, const ops::Output& y) const {
  const AcquiredWeight w(*store_, weight_);
  ops::Gemm(ctx, x, Transpose::kNo, w.tensor(), Transpose::kYes, y);
}

void Linear::Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& x,
                      const ops::Output& dx) const {
  ops::Gemm(ctx, dy, Transpose::kYes, x, Transpose::kNo, store_->GradientOutput(weight_));
  const AcquiredWeight w(*store_, weight_);
  ops::Gemm(ctx, dy, Transpose::kNo, w.tensor(), Transpose::kNo, dx);
}

}  // namespace cistron::nn
