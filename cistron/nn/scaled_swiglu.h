// ScaledSwiGLU: y = silu(a) · b · s of x = [a | b], s one factor a row (1 where not given).
//
// Gate and up columns may alternate in pieces of glu_interleave_size, as ActivationConfig says;
// only the plain layout fuses.
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"
#include "cistron/ops/activation/scaled_activation.h"

namespace cistron::nn {

class ScaledSwiGLU final : public BasicOp {
 public:
  explicit ScaledSwiGLU(std::string name = "scaled_swiglu", std::int64_t glu_interleave_size = 0)
      : name_(std::move(name)), config_{.glu_interleave_size = glu_interleave_size} {}

  std::string_view kind() const override { return "ScaledSwiGLU"; }
  std::span<const std::string_view> extra_inputs() const override {
    static constexpr std::string_view kInputs[] = {"split_sizes", "scale"};
    return kInputs;
  }
  const std::string& name() const override { return name_; }
  std::int64_t input_parts() const override { return is_interleaved() ? 1 : 2; }
  std::int64_t input_interleave() const override { return config_.glu_interleave_size; }
  bool is_interleaved() const { return config_.glu_interleave_size != 0; }

  // x [M, 2F] → [M, F]; takes scale and, for rows that belong to groups, split_sizes.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

  // What forward leaves for backward; fused ops of one direction leave and take it as the op does.
  struct Record {
    Tensor x, scale, split_sizes;
    std::int64_t bytes() const { return x.bytes() + (scale ? scale.bytes() : 0); }
  };
  void Save(const Tensor& x, const ExtraInputs& extra, Saved* saved) const;
  Record Take(Saved& saved) const { return saved.Pop<Record>(this, name_); }

 private:
  std::string name_;
  ops::ActivationConfig config_;  // swiglu
};

}  // namespace cistron::nn
