// ScaledActivation: any activation of ops/activation with one factor a row, for experts other than
// GroupedLinear → ScaledSwiGLU → GroupedLinear, which is the sequence that fuses.
//
//   y = act(x) · s       s: `scale`, one factor a row, 1 where it is not given
//
// Gate and up columns that alternate (glu_interleave_size) cannot follow a linear layer that
// quantises in blocks, unless no block meets both: see WeightProducts::SetOutputInterleave.
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"
#include "cistron/ops/activation/scaled_activation.h"

namespace cistron::nn {

class ScaledActivation final : public BasicOp {
 public:
  explicit ScaledActivation(const ops::ActivationConfig& config,
                            std::string name = "scaled_activation")
      : config_(config), name_(std::move(name)) {}

  std::string_view kind() const override { return "ScaledActivation"; }
  std::span<const std::string_view> extra_inputs() const override {
    static constexpr std::string_view kInputs[] = {"split_sizes", "scale"};
    return kInputs;
  }
  const std::string& name() const override { return name_; }
  std::int64_t input_parts() const override {
    return ops::IsGated(config_.kind) && config_.glu_interleave_size == 0 ? 2 : 1;
  }
  std::int64_t input_interleave() const override {
    return ops::IsGated(config_.kind) ? config_.glu_interleave_size : 0;
  }
  const ops::ActivationConfig& config() const { return config_; }

  // x [M, 2F] (srelu: [M, F]) → [M, F].
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

 private:
  struct Record {
    Tensor x, scale, split_sizes;
    std::int64_t bytes() const { return x.bytes() + (scale ? scale.bytes() : 0); }
  };
  ops::ActivationConfig config_;
  std::string name_;
};

}  // namespace cistron::nn
