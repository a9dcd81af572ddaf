#include "cistron/nn/quantize.h"

#include "cistron/ops/quantize/quantize.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"

namespace cistron::nn {

void Quantize::SetPosition(std::size_t position) {
  if (unnamed_) options_.name = fmt::format("{}.quantize", position);
  unnamed_ = false;
}

Tensor Quantize::Round(const ops::Context& ctx, const Tensor& x, const Tensor& split_sizes,
                       const quant::Recipe& recipe, quant::TensorRole role) const {
  if (!quant::Quantizes(recipe)) return x;
  const QuantizedTensor q =
      quant::QuantizeOperand(ctx, recipe,
                             {.role = role,
                              .name = options_.name,
                              .owner = this,
                              .x = x,
                              .split_sizes = split_sizes,
                              .copies = {.rowwise = true, .columnwise = false}});
  Tensor y = ctx.Empty(x.shape(), x.dtype());
  ops::Dequantize(ctx, q, Direction::kRowwise, ops::Write(y));
  return y;
}

Tensor Quantize::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                         Saved* saved) const {
  CISTRON_CHECK(x && x.rank() == 2, "{}: x is {}, expected [M, K]", name(), Describe(x));
  const quant::Recipe recipe = quant::RecipeFor(name());
  if (saved != nullptr) saved->Push<Record>(this, name()) = {recipe, extra.split_sizes};
  if (!options_.forward) return x;
  return Round(ctx, x, extra.split_sizes, recipe, quant::TensorRole::kInput);
}

Tensor Quantize::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                          Saved& saved) const {
  const Record r = saved.Pop<Record>(this, name());
  if (!out.input) return {};
  if (!options_.backward) return dy;
  return Round(ctx, dy, r.split_sizes, r.recipe, quant::TensorRole::kOutputGradient);
}

}  // namespace cistron::nn
