// Argument checks, scales of whole tensors and choice of the implementation of quantize.
#include "cistron/ops/quantize/quantize.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/quantize/quantize_impls.h"

namespace cistron::ops {
namespace {

void CheckFormat(DType format) {
  CISTRON_CHECK(format == DType::kE4M3 || format == DType::kE5M2,
                "quantize: format {} is neither e4m3 nor e5m2", Name(format));
}

// The logical tensor as one matrix; rows keep their stride.
Tensor AsMatrix(const Tensor& t) {
  return t.rank() == 3 ? t.Reshape({t.dim(0) * t.dim(1), t.dim(2)}) : t;
}

void CheckSide(std::string_view name, const Tensor& t, const QuantizedTensor& q) {
  CISTRON_CHECK(t && t.shape() == q.shape, "quantize: {} is {}, not of shape {}", name, Describe(t),
                ToString(q.shape));
  CISTRON_CHECK(t.dtype() == DType::kF32 || t.dtype() == DType::kBF16,
                "quantize: {} is {}; its dtype must be f32 or bf16", name, Describe(t));
  CISTRON_CHECK(t.rank() == 3 ? t.IsContiguous() : t.dim(1) <= 1 || t.stride(1) == 1,
                "quantize: the rows of {} ({}) are not contiguous", name, Describe(t));
}

void CheckCopy(const QuantizedTensor& q, Direction direction) {
  const QuantizedCopy& copy = q.copy(direction);
  const char* name = direction == Direction::kRowwise ? "row-wise" : "column-wise";
  CISTRON_CHECK(copy, "quantize: the tensor has no {} copy", name);
  CheckTensor("quantize", fmt::format("{} codes", name), copy.codes, q.shape, q.layout.format);
  const bool mx =
      q.layout.scaling == Scaling::kMxfp8 || q.layout.scaling == Scaling::kMxfp8Block32x32;
  CheckTensor("quantize", fmt::format("{} scales", name), copy.scales,
              ScaleShape(q.layout, q.shape, q.split_sizes, direction),
              mx ? DType::kE8M0 : DType::kF32);
}

const QuantizeRun& Choose(const Context& ctx, const QuantizeProblem& problem) {
  return Select(ctx, "quantize", QuantizeImpls(), problem);
}

}  // namespace

std::span<const QuantizeImpl> QuantizeImpls() {
  static const std::array impls = {internal::CpuQuantize(), internal::RefQuantize()};
  return impls;
}

float MaxOf(DType format) {
  CheckFormat(format);
  return format == DType::kE4M3 ? e4m3::kMax : e5m2::kMax;
}

float ScaleFromAmax(float amax, DType format, bool power_of_two) {
  if (amax == 0 || !std::isfinite(amax)) return 1.0f;
  float scale = MaxOf(format) / amax;
  if (std::isinf(scale)) scale = std::numeric_limits<float>::max();
  if (!power_of_two) return scale;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) & 0x7f800000u);
}

QuantizedTensor EmptyQuantized(const Context& ctx, const Shape& shape, const Tensor& split_sizes,
                               const QuantizedLayout& layout, const QuantizeCopies& copies) {
  CheckFormat(layout.format);
  CISTRON_CHECK(shape.rank() == 2 || (shape.rank() == 3 && !split_sizes),
                "quantize: shape {} is neither [M, K] nor, without split_sizes, [G, M, K]",
                ToString(shape));
  const std::int64_t rows = shape[shape.rank() - 2], cols = shape[shape.rank() - 1];
  CISTRON_CHECK(layout.row_parts >= 1 && rows % layout.row_parts == 0 &&
                    (layout.row_parts == 1 || !split_sizes),
                "quantize: {} row parts do not divide the rows of {}{}", layout.row_parts,
                ToString(shape), split_sizes ? ", whose groups part them already" : "");
  CISTRON_CHECK(layout.col_parts >= 1 && cols % layout.col_parts == 0,
                "quantize: {} column parts do not divide the columns of {}", layout.col_parts,
                ToString(shape));
  QuantizedTensor q{layout, shape, split_sizes, {}, {}};
  const bool mx = layout.scaling == Scaling::kMxfp8 || layout.scaling == Scaling::kMxfp8Block32x32;
  const auto make = [&](Direction direction) {
    return QuantizedCopy{ctx.Empty(shape, layout.format),
                         ctx.Empty(ScaleShape(layout, shape, split_sizes, direction),
                                   mx ? DType::kE8M0 : DType::kF32)};
  };
  if (IsDirectionless(layout.scaling)) {
    q.rowwise = q.columnwise = make(Direction::kRowwise);
    return q;
  }
  if (copies.rowwise) q.rowwise = make(Direction::kRowwise);
  if (copies.columnwise) q.columnwise = make(Direction::kColumnwise);
  return q;
}

void TensorAmax(const Context& ctx, const Tensor& x, const QuantizedTensor& out,
                const Tensor& amax) {
  CheckFormat(out.layout.format);
  CheckSide("x", x, out);
  CISTRON_CHECK(out.layout.scaling == Scaling::kTensor,
                "quantize: the amax of the whole tensor was asked for with scaling {}",
                Name(out.layout.scaling));
  CheckTensor("quantize", "amax", amax, {out.num_groups()}, DType::kF32);
  const QuantizeProblem problem{out.layout.scaling, out.layout.format, x.dtype()};
  AnnounceWork(ctx, 0, x, Tensor(), Tensor());
  Choose(ctx, problem)
      .amax(ctx, MakeBlockGrid("quantize", out, Direction::kRowwise), AsMatrix(x), amax);
}

void Quantize(const Context& ctx, const Tensor& x, bool power_of_two, const TensorScale& scale,
              const QuantizedTensor& out) {
  CheckFormat(out.layout.format);
  CheckSide("x", x, out);
  const bool whole = out.layout.scaling == Scaling::kTensor;
  CISTRON_CHECK(whole || (!scale.scale && !scale.amax),
                "quantize: a scale or an amax of the whole tensor was given for scaling {}",
                Name(out.layout.scaling));
  const QuantizeProblem problem{out.layout.scaling, out.layout.format, x.dtype()};
  AnnounceWork(ctx, 0, x, out.rowwise.codes,
               IsDirectionless(out.layout.scaling) ? Tensor() : out.columnwise.codes);
  const QuantizeRun& run = Choose(ctx, problem);
  const Tensor matrix = AsMatrix(x);
  const Shape groups{out.num_groups()};
  Tensor factor = scale.scale;
  if (factor) CheckTensor("quantize", "scale", factor, groups, DType::kF32);
  if (scale.amax) CheckTensor("quantize", "amax", scale.amax, groups, DType::kF32);
  if (whole && (!factor || scale.amax)) {
    const Tensor amax = scale.amax ? scale.amax : ctx.Empty(groups, DType::kF32);
    run.amax(ctx, MakeBlockGrid("quantize", out, Direction::kRowwise), matrix, amax);
    if (!factor) {
      factor = ctx.Empty(groups, DType::kF32);
      for (std::int64_t g = 0; g < groups[0]; ++g) {
        factor.data<float>()[g] =
            ScaleFromAmax(amax.data<float>()[g], out.layout.format, power_of_two);
      }
    }
  }
  std::vector<QuantizeTarget> targets;
  for (const Direction direction : {Direction::kRowwise, Direction::kColumnwise}) {
    const QuantizedCopy& copy = out.copy(direction);
    const bool done = direction == Direction::kColumnwise && out.rowwise &&
                      copy.codes.raw() == out.rowwise.codes.raw();
    if (!copy || done) continue;
    CheckCopy(out, direction);
    targets.push_back({direction,
                       MakeBlockGrid("quantize", out, direction),
                       {AsMatrix(copy.codes), copy.scales}});
  }
  run.quantize(ctx, problem, targets, power_of_two, matrix, factor);
}

void Dequantize(const Context& ctx, const QuantizedTensor& q, Direction direction,
                const Output& y) {
  CheckCopy(q, direction);
  CheckSide("y", y.tensor, q);
  const QuantizeProblem problem{q.layout.scaling, q.layout.format, y.tensor.dtype()};
  const QuantizedCopy& copy = q.copy(direction);
  Choose(ctx, problem)
      .dequantize(ctx, problem, MakeBlockGrid("dequantize", q, direction),
                  {AsMatrix(copy.codes), copy.scales}, {AsMatrix(y.tensor), y.mode});
}

}  // namespace cistron::ops
