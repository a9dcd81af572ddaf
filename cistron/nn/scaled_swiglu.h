// ScaledSwiGLU: y = silu(a) · b · s of x = [a | b], s one factor a row (1 where not given).
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"

namespace cistron::nn {

class ScaledSwiGLU final : public BasicOp {
 public:
  explicit ScaledSwiGLU(std::string name = "scaled_swiglu") : name_(std::move(name)) {}

  std::string_view kind() const override { return "ScaledSwiGLU"; }
  std::span<const std::string_view> extra_inputs() const override {
    static constexpr std::string_view kInputs[] = {"split_sizes", "scale"};
    return kInputs;
  }
  const std::string& name() const override { return name_; }
  std::int64_t input_parts() const override { return 2; }

  // x [M, 2F] → [M, F]; takes scale and, for rows that belong to groups, split_sizes.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const BackwardOutputs& out,
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
};

}  // namespace cistron::nn
