#include "cistron/nn/scaled_activation.h"

namespace cistron::nn {

Tensor ScaledActivation::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                                 Saved* saved) const {
  const std::int64_t columns = ops::IsGated(config_.kind) ? 2 : 1;
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) % columns == 0, "{}: x is {}, expected {}", name_,
                Describe(x), columns == 2 ? "[M, 2F]" : "[M, F]");
  Tensor y = ctx.Empty({x.dim(0), x.dim(1) / columns}, x.dtype());
  ops::ScaledActivationForward(ctx, config_, x, extra.scale, extra.split_sizes, ops::Write(y));
  if (saved != nullptr) saved->Push<Record>(this, name_) = {x, extra.scale, extra.split_sizes};
  return y;
}

Tensor ScaledActivation::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                                  Saved& saved) const {
  const Record r = saved.Pop<Record>(this, name_);
  if (!out.input && !out.scale) return {};
  Tensor dx = ctx.Empty(r.x.shape(), dy.dtype());
  ops::ScaledActivationBackward(ctx, config_, dy, r.x, r.scale, r.split_sizes, ops::Write(dx),
                                out.scale, {});
  return out.input ? dx : Tensor();
}

}  // namespace cistron::nn
