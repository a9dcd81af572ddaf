// RmsNorm: normalisation with a gain, of a residual stream.
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"
#include "cistron/nn/parameter.h"

namespace cistron::nn {

class RmsNorm final : public BasicOp {
 public:
  RmsNorm(ParameterStore& store, const std::string& name, std::int64_t width, double eps);

  std::string_view kind() const override { return "RMSNorm"; }
  std::span<const std::string_view> extra_inputs() const override { return {}; }
  const std::string& name() const override { return name_; }

  // x [T, H] → [T, H], without a residual.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

  struct Result {
    Tensor y;  // [T, H], normalised
    Tensor h;  // [T, H], the residual stream: x + residual
  };
  // `residual` may be undefined. With `saved` null, nothing is kept for backward.
  Result Forward(const ops::Context& ctx, const Tensor& x, const Tensor& residual,
                 Saved* saved) const;
  // `dh`, optional, is the gradient that the stream h receives from elsewhere. Returns the gradient
  // of h, which is that of x and of residual.
  Tensor Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& dh, Saved& saved) const;

 private:
  struct Record {
    Tensor h, rstd;
    std::uint64_t version = 0;
  };
  ParameterStore* store_;
  ParameterId gain_;
  double eps_;
  std::string name_;
};

}  // namespace cistron::nn
