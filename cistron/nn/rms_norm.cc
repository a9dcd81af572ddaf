#include "cistron/nn/rms_norm.h"

#include "cistron/ops/norm/norm.h"

namespace cistron::nn {

RmsNorm::RmsNorm(ParameterStore& store, const std::string& name, std::int64_t width, double eps)
    : store_(&store), eps_(eps), name_(name) {
  gain_ = store.Register(
      {.name = name, .shape = {width}, .init = ParameterSpec::Init::kOnes, .decays = false});
}

RmsNorm::Result RmsNorm::Forward(const ops::Context& ctx, const Tensor& x, const Tensor& residual,
                                 Saved* saved) const {
  Result r;
  r.y = ctx.Empty(x.shape(), x.dtype());
  r.h = residual ? ctx.Empty(x.shape(), x.dtype()) : x;
  Tensor rstd;
  if (saved != nullptr) rstd = ctx.Empty({x.dim(0)}, ComputeType(x.dtype()));
  const AcquiredWeight gain(*store_, gain_);
  ops::RmsNormForward(ctx, x, residual, gain.tensor(), eps_, residual ? r.h : Tensor(), rstd,
                      ops::Write(r.y));
  if (saved != nullptr) saved->Push<Record>(this, name_) = {r.h, rstd, store_->version()};
  return r;
}

Tensor RmsNorm::Backward(const ops::Context& ctx, const Tensor& dy, const Tensor& dh,
                         Saved& saved) const {
  const Record record = saved.Pop<Record>(this, name_);
  CheckVersionOfForward(*store_, record.version, name_);
  Tensor out = ctx.Empty(dy.shape(), dy.dtype());
  const AcquiredWeight gain(*store_, gain_);
  ops::RmsNormBackward(ctx, dy, record.h, record.rstd, gain.tensor(), dh, ops::Write(out),
                       store_->GradientOutput(gain_));
  return out;
}

Tensor RmsNorm::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs&,
                        Saved* saved) const {
  return Forward(ctx, x, Tensor(), saved).y;
}

Tensor RmsNorm::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                         Saved& saved) const {
  const Record record = saved.Pop<Record>(this, name_);
  CheckVersionOfForward(*store_, record.version, name_);
  Tensor dx = ctx.Empty(dy.shape(), dy.dtype());
  const AcquiredWeight gain(*store_, gain_);
  ops::RmsNormBackward(ctx, dy, record.h, record.rstd, gain.tensor(), {}, ops::Write(dx),
                       out.weights ? store_->GradientOutput(gain_) : ops::Output{});
  return out.input ? dx : Tensor();
}

}  // namespace cistron::nn
