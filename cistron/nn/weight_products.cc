#include "cistron/nn/weight_products.h"

#include <algorithm>

#include "cistron/base/error.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/quantized_gemm/quantized_gemm.h"
#include "cistron/quant/autocast.h"

namespace cistron::nn {

using ops::Transpose;

quant::Recipe WeightProducts::recipe() const {
  return quant::RecipeFor(name());
}

void WeightProducts::CheckVersion(std::uint64_t version_of_forward) const {
  CheckVersionOfForward(*store_, version_of_forward, name());
}

void WeightProducts::CheckInterleave(const quant::Recipe& recipe) const {
  if (output_interleave_ == 0) return;
  const auto block_of = [&](quant::TensorRole role) {
    return BlockSize(quant::LayoutOf(recipe, role).scaling);
  };
  const std::int64_t block =
      std::max(block_of(quant::TensorRole::kWeight), block_of(quant::TensorRole::kOutputGradient));
  if (block == 0 || output_interleave_ % block == 0) return;
  CISTRON_THROW(kUnsupported,
                "{}: gate and up alternate in blocks of {}, and the blocks of {} in {} would hold "
                "both; set glu_interleave_size to 0 or a multiple of {}, or take a recipe without "
                "blocks: BF16, DelayedScaling or Float8CurrentScaling",
                name(), output_interleave_, block, quant::Name(recipe), block);
}

Operand WeightProducts::Input(const Tensor& x, const Tensor& split_sizes) const {
  return {x, split_sizes, quant::TensorRole::kInput, name(), owner(), spec().is_expert};
}

Operand WeightProducts::OutputGradient(const Tensor& dy, const Tensor& split_sizes) const {
  return {dy,
          split_sizes,
          quant::TensorRole::kOutputGradient,
          name(),
          owner(),
          spec().is_expert,
          spec().row_parts};
}

void WeightProducts::Forward(const ops::Context& ctx, const quant::Recipe& recipe, Operand& x,
                             bool for_backward, const ops::Output& y) const {
  if (quant::Quantizes(recipe)) {
    CheckInterleave(recipe);
    const QuantizedTensor& q = x.Quantized(ctx, recipe, for_backward);
    return ops::QuantizedGemmForward(ctx, q, store_->AcquireQuantized(weight_, recipe), y);
  }
  const AcquiredWeight w(*store_, weight_);
  if (grouped()) {
    ops::GroupedGemmForward(ctx, {x.tensor(), x.split_sizes()}, w.tensor(), y);
  } else {
    ops::Gemm(ctx, x.tensor(), Transpose::kNo, w.tensor(), Transpose::kYes, y);
  }
}

void WeightProducts::Dgrad(const ops::Context& ctx, const quant::Recipe& recipe, Operand& dy,
                           const ops::Output& dx) const {
  if (quant::Quantizes(recipe)) {
    const QuantizedTensor& q = dy.Quantized(ctx, recipe, /*columnwise=*/true);
    return ops::QuantizedGemmDgrad(ctx, q, store_->AcquireQuantized(weight_, recipe), dx);
  }
  const AcquiredWeight w(*store_, weight_);
  if (grouped()) {
    ops::GroupedGemmDgrad(ctx, {dy.tensor(), dy.split_sizes()}, w.tensor(), dx);
  } else {
    ops::Gemm(ctx, dy.tensor(), Transpose::kNo, w.tensor(), Transpose::kNo, dx);
  }
}

void WeightProducts::Wgrad(const ops::Context& ctx, Operand& dy, const SavedOperand& x) const {
  CheckVersion(x.version);
  const ops::Output dw = store_->GradientOutput(weight_);
  if (quant::Quantizes(x.recipe)) {
    return ops::QuantizedGemmWgrad(ctx, dy.Quantized(ctx, x.recipe, /*columnwise=*/true),
                                   x.quantized, dw);
  }
  if (grouped()) {
    const GroupedTensor dy_rows{dy.tensor(), dy.split_sizes()}, x_rows{x.tensor, dy.split_sizes()};
    const auto take_squares = SquareSumsTaker();
    if (!take_squares || dw.mode != ops::WriteMode::kWrite) {
      return ops::GroupedGemmWgrad(ctx, dy_rows, x_rows, dw);
    }
    const Tensor squares = ops::GroupedGemmWgradWithSquares(ctx, dy_rows, x_rows, dw.tensor);
    if (squares) take_squares(squares);
  } else {
    ops::Gemm(ctx, dy.tensor(), Transpose::kYes, x.tensor, Transpose::kNo, dw);
  }
}

std::function<void(const Tensor&)> WeightProducts::SquareSumsTaker() const {
  if (!store_->takes_square_sums()) return nullptr;
  return [store = store_, id = weight_](const Tensor& sums) { store->OfferSquareSums(id, sums); };
}

}  // namespace cistron::nn
