// GroupedMLP: GroupedLinear → ScaledSwiGLU → GroupedLinear as one op, forward and backward.
//
//   P = x · W1[e]ᵀ;  A = silu(gate)·up·s;  y = A · W2[e]ᵀ
//   dA = dy · W2[e];  (dP, ds, A) from (dA, P, s);  dW2 = dyᵀ·A;  dW1 = dPᵀ·x;  dx = dP · W1[e]
// Kept for backward: x, P, s and the counts. A is made again there, from the same P and with the
// same bits, so that forward need not keep it.
// Without quantisation both directions are ops::GroupedMlp…; recipes that quantise are in
// grouped_mlp_quantized.cc.
#pragma once

#include "cistron/nn/fuse/plan.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"

namespace cistron::nn::fuse {

Pattern GroupedMlpPattern();

class GroupedMlp final : public FusedOp {
 public:
  GroupedMlp(const GroupedLinear& fc1, const ScaledSwiGLU& activation, const GroupedLinear& fc2)
      : fc1_(fc1), activation_(activation), fc2_(fc2) {}

  std::string_view name() const override { return "GroupedMLP"; }
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

 private:
  std::string Label() const;  // for messages

  struct Record {
    SavedOperand x;
    Tensor pre_activation, scale, split_sizes;
    std::uint64_t fc2_version = 0;  // its store may be another
    std::int64_t bytes() const {
      return x.bytes() + pre_activation.bytes() + (scale ? scale.bytes() : 0);
    }
  };
  void QuantizedForward(const ops::Context& ctx, const quant::Recipe& recipe, const Tensor& x,
                        bool training, const Tensor& y, Record& r) const;
  void QuantizedBackward(const ops::Context& ctx, const Tensor& dy, const BackwardOutputs& out,
                         const Record& r, const Tensor& dx) const;

  const GroupedLinear& fc1_;
  const ScaledSwiGLU& activation_;
  const GroupedLinear& fc2_;
};

}  // namespace cistron::nn::fuse
