#include "cistron/nn/scaled_swiglu.h"

#include "cistron/ops/activation/activation.h"

namespace cistron::nn {

Tensor ScaledSwiGLU::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                             Saved* saved) const {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) % 2 == 0, "{}: x is {}, expected [M, 2F]", name_,
                Describe(x));
  Tensor y = ctx.Empty({x.dim(0), x.dim(1) / 2}, x.dtype());
  if (is_interleaved()) {
    ops::ScaledActivationForward(ctx, config_, x, extra.scale, extra.split_sizes, ops::Write(y));
  } else {
    ops::SwiGluForward(ctx, x, extra.scale, extra.split_sizes, ops::Write(y));
  }
  Save(x, extra, saved);
  return y;
}

void ScaledSwiGLU::Save(const Tensor& x, const ExtraInputs& extra, Saved* saved) const {
  if (saved != nullptr) saved->Push<Record>(this, name_) = {x, extra.scale, extra.split_sizes};
}

Tensor ScaledSwiGLU::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                              Saved& saved) const {
  const Record r = Take(saved);
  if (!out.input && !out.scale) return {};
  Tensor dx = ctx.Empty(r.x.shape(), dy.dtype());
  if (is_interleaved()) {
    ops::ScaledActivationBackward(ctx, config_, dy, r.x, r.scale, r.split_sizes, ops::Write(dx),
                                  out.scale, {});
  } else {
    ops::SwiGluBackward(ctx, dy, r.x, r.scale, r.split_sizes, ops::Write(dx), out.scale, {});
  }
  return out.input ? dx : Tensor();
}

}  // namespace cistron::nn
