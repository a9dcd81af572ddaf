// SwiGLULinear: ScaledSwiGLU → GroupedLinear in one direction, for windows that GroupedMLP does not
// take, e.g. because the first layer has a bias.
//
// Forward: each chunk of the activation goes to the product while it is in the cache; in training
// it is kept besides, since the weight gradient needs it. Backward: the product for dA and the
// activation's backward, chunk by chunk; dA is never whole. Both leave and take the records of the
// basic ops, so that either direction may be fused without the other.
#pragma once

#include "cistron/nn/fuse/plan.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"

namespace cistron::nn::fuse {

Pattern SwiGluLinearForwardPattern();
// Refuses where the gradient of its input is not wanted: the activation alone
// then has less to do, or nothing.
Pattern SwiGluLinearBackwardPattern();

class SwiGluLinear final : public FusedOp {
 public:
  SwiGluLinear(const ScaledSwiGLU& activation, const GroupedLinear& linear)
      : activation_(activation), linear_(linear) {}

  std::string_view name() const override { return "SwiGLULinear"; }
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

 private:
  const ScaledSwiGLU& activation_;
  const GroupedLinear& linear_;
};

}  // namespace cistron::nn::fuse
