// GroupedMLP under a recipe that quantises: waves of whole experts, since a scale may need the amax
// of an expert's whole tensor and blocks along rows restart at each expert. x and dy are quantised
// once; what lies between, A, dA and dP, exists for one wave at a time.
#include "cistron/nn/fuse/grouped_mlp.h"

#include <algorithm>

#include "cistron/ops/activation/activation.h"
#include "cistron/ops/grouped_mlp/row_pieces.h"
#include "cistron/ops/quantized_gemm/quantized_gemm.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"

namespace cistron::nn::fuse {
namespace {

// Groups [begin, end) and their rows.
struct Wave {
  std::int64_t begin, end, first, rows;
  std::int64_t groups() const { return end - begin; }
  Tensor Rows(const Tensor& t) const { return t ? t.Slice(0, first, rows) : t; }
  ops::Output Rows(const ops::Output& o) const { return {Rows(o.tensor), o.mode}; }
  // Of a tensor with one matrix a group.
  ops::Output Groups(const ops::Output& o) const {
    return {o.tensor.Slice(0, begin, groups()), o.mode};
  }
};

// What the waves of one pass have in common.
class Waves {
 public:
  Waves(const ops::Context& ctx, const quant::Recipe& recipe, const Tensor& split_sizes,
        std::int64_t max_rows, std::int64_t row_bytes)
      : ctx_(ctx),
        recipe_(recipe),
        split_sizes_(split_sizes),
        // Ranks that take amax together must ask for the same groups: one at a time.
        wave_rows_(quant::AmaxReducerFor(recipe) == nullptr ? ops::internal::WaveRows(row_bytes)
                                                            : -1),
        offsets_(ops::RowOffsets("GroupedMLP", split_sizes, max_rows)) {}

  // Calls f(wave) for waves that cover all groups in order.
  template <class F>
  void ForEach(F&& f) const {
    const std::int64_t groups = split_sizes_.numel();
    for (std::int64_t begin = 0, end = 0; begin < groups; begin = end) {
      while (end < groups && (end == begin || At(end + 1) - At(begin) <= wave_rows_)) ++end;
      f(Wave{begin, end, At(begin), At(end) - At(begin)});
    }
  }
  std::int64_t MostRows() const {
    std::int64_t most = 0;
    ForEach([&](const Wave& w) { most = std::max(most, w.rows); });
    return most;
  }
  QuantizedTensor Of(const QuantizedTensor& q, const Wave& w) const {
    return SliceGroups(q, offsets_, w.begin, w.end);
  }
  Tensor SplitSizes(const Wave& w) const { return split_sizes_.Slice(0, w.begin, w.groups()); }

  // Rows of a wave, quantised as part of the layer's tensor of all rows.
  QuantizedTensor Quantize(const Wave& w, quant::TensorRole role, const WeightProducts& layer,
                           const Tensor& x, std::int64_t col_parts,
                           const ops::QuantizeCopies& copies) const {
    return quant::QuantizeOperand(ctx_, recipe_,
                                  {.role = role,
                                   .name = layer.name(),
                                   .owner = layer.owner(),
                                   .is_expert = layer.spec().is_expert,
                                   .x = x,
                                   .split_sizes = SplitSizes(w),
                                   .col_parts = col_parts,
                                   .copies = copies,
                                   .first_group = w.begin,
                                   .groups = split_sizes_.numel()});
  }

 private:
  std::int64_t At(std::int64_t e) const { return offsets_[static_cast<std::size_t>(e)]; }

  const ops::Context& ctx_;
  const quant::Recipe& recipe_;
  Tensor split_sizes_;
  std::int64_t wave_rows_;
  std::vector<std::int64_t> offsets_;
};

}  // namespace

void GroupedMlp::QuantizedForward(const ops::Context& ctx, const quant::Recipe& recipe,
                                  const Tensor& x, bool training, const Tensor& y,
                                  Record& r) const {
  const std::int64_t width = fc2_.options().in_features;
  // A wave holds A and its codes, and P where nobody keeps it.
  const auto size = static_cast<std::int64_t>(SizeOf(x.dtype()));
  const Waves waves(ctx, recipe, r.split_sizes, x.dim(0), width * ((training ? 1 : 3) * size + 1));
  Operand input = fc1_.products().Input(x, r.split_sizes);
  const QuantizedTensor& qx = input.Quantized(ctx, recipe, /*columnwise=*/training);
  const QuantizedTensor w1 = fc1_.products().Quantized(recipe);
  const QuantizedTensor w2 = fc2_.products().Quantized(recipe);
  if (training) r.pre_activation = ctx.Empty({x.dim(0), 2 * width}, x.dtype());
  const std::int64_t most = waves.MostRows();
  const Tensor pre_buffer = training ? Tensor() : ctx.Empty({most, 2 * width}, x.dtype());
  const Tensor act_buffer = ctx.Empty({most, width}, x.dtype());
  waves.ForEach([&](const Wave& w) {
    const Tensor pre = training ? w.Rows(r.pre_activation) : pre_buffer.Slice(0, 0, w.rows);
    const Tensor act = act_buffer.Slice(0, 0, w.rows);
    ops::QuantizedGemmForward(ctx, waves.Of(qx, w), waves.Of(w1, w), ops::Write(pre));
    ops::SwiGluForward(ctx, pre, w.Rows(r.scale), {}, ops::Write(act));
    const QuantizedTensor qact = waves.Quantize(w, quant::TensorRole::kInput, fc2_.products(), act,
                                                1, {.rowwise = true, .columnwise = false});
    ops::QuantizedGemmForward(ctx, qact, waves.Of(w2, w), ops::Write(w.Rows(y)));
  });
  if (training) r.x = fc1_.products().Save(ctx, recipe, input);
}

void GroupedMlp::QuantizedBackward(const ops::Context& ctx, const Tensor& dy,
                                   const BackwardOutputs& out, const Record& r,
                                   const Tensor& dx) const {
  const quant::Recipe& recipe = r.x.recipe;
  const std::int64_t width = fc2_.options().in_features;
  // A wave holds dA, dP, A, and the codes of dP (twice) and A.
  const Waves waves(ctx, recipe, r.split_sizes, dy.dim(0),
                    width * (4 * static_cast<std::int64_t>(SizeOf(dy.dtype())) + 5));
  Operand gradient = fc2_.products().OutputGradient(dy, r.split_sizes);
  const QuantizedTensor& qdy = gradient.Quantized(ctx, recipe, /*columnwise=*/out.weights);
  const QuantizedTensor w1 = fc1_.products().Quantized(recipe);
  const QuantizedTensor w2 = fc2_.products().Quantized(recipe);
  ops::Output dw1, dw2;
  if (out.weights) {
    dw2 = fc2_.products().GradientOutput();
    dw1 = fc1_.products().GradientOutput();
  }
  const std::int64_t most = waves.MostRows();
  const Tensor dact_buffer = ctx.Empty({most, width}, dy.dtype());
  const Tensor dpre_buffer = ctx.Empty({most, 2 * width}, dy.dtype());
  const Tensor act_buffer = out.weights ? ctx.Empty({most, width}, dy.dtype()) : Tensor();
  waves.ForEach([&](const Wave& w) {
    const Tensor dact = dact_buffer.Slice(0, 0, w.rows), dpre = dpre_buffer.Slice(0, 0, w.rows);
    const QuantizedTensor dy_part = waves.Of(qdy, w);
    ops::QuantizedGemmDgrad(ctx, dy_part, waves.Of(w2, w), ops::Write(dact));
    const Tensor act = out.weights ? act_buffer.Slice(0, 0, w.rows) : Tensor();
    ops::SwiGluBackward(ctx, dact, w.Rows(r.pre_activation), w.Rows(r.scale), {}, ops::Write(dpre),
                        w.Rows(out.scale), ops::Write(act));
    if (!out.weights && !dx) return;  // the first layer has nothing to do
    const QuantizedTensor qdpre = waves.Quantize(
        w, quant::TensorRole::kOutputGradient, fc1_.products(), dpre,
        fc1_.products().spec().row_parts, {.rowwise = true, .columnwise = out.weights});
    if (out.weights) {
      const QuantizedTensor qact = waves.Quantize(w, quant::TensorRole::kInput, fc2_.products(),
                                                  act, 1, {.rowwise = false, .columnwise = true});
      ops::QuantizedGemmWgrad(ctx, dy_part, qact, w.Groups(dw2));
      ops::QuantizedGemmWgrad(ctx, qdpre, waves.Of(r.x.quantized, w), w.Groups(dw1));
    }
    if (dx) ops::QuantizedGemmDgrad(ctx, qdpre, waves.Of(w1, w), ops::Write(w.Rows(dx)));
  });
}

}  // namespace cistron::nn::fuse
