// quantized_gemm: every implementation against fp64 products of the decoded operands, under the
// derived bound, and against values made with numpy.
#include "cistron/ops/quantized_gemm/quantized_gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/testing/golden_file.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using Kind = QuantizedGemmKind;

struct Operands {
  QuantizedTensor x, w, dy;
};

// Quantises with every copy.
QuantizedTensor Make(const Tensor& t, const Tensor& split_sizes, const QuantizedLayout& layout) {
  const Context ctx = Context().WithImpl("ref");
  const QuantizedTensor q = EmptyQuantized(ctx, t.shape(), split_sizes, layout, {});
  Quantize(ctx, t, layout.scaling != Scaling::kTensor, {}, q);
  return q;
}

Tensor Decoded(const QuantizedTensor& q, Direction direction) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor y = ctx.Zeros(q.shape, DType::kF32);
  Dequantize(ctx, q, direction, Write(y));
  return y;
}

// The exact result in fp64 and Σ|a||b| of each element; rows of no group keep what `like` has.
struct Exact {
  Tensor value, abs_sum;
  std::int64_t terms;
};
Exact Reference(Kind kind, const QuantizedTensor& a, const QuantizedTensor& b, const Shape& shape) {
  const bool wgrad = kind == Kind::kWgrad;
  const Tensor x = Decoded(a, wgrad ? Direction::kColumnwise : Direction::kRowwise);
  const Tensor y =
      Decoded(b, kind == Kind::kForward ? Direction::kRowwise : Direction::kColumnwise);
  Exact exact{Tensor::Zeros(shape, DType::kF64), Tensor::Zeros(shape, DType::kF64), 0};
  std::vector<std::int64_t> offsets = {0, a.shape[0]};
  if (a.split_sizes) offsets = RowOffsets("test", a.split_sizes, a.shape[0]);
  const auto add = [&](std::int64_t at, float p, float q) {
    exact.value.data<double>()[at] += static_cast<double>(p) * static_cast<double>(q);
    exact.abs_sum.data<double>()[at] += std::abs(static_cast<double>(p) * static_cast<double>(q));
  };
  const std::int64_t cols = shape[shape.rank() - 1], inner = a.shape[1];
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto group = static_cast<std::int64_t>(e);
    for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < inner; ++i) {
        for (std::int64_t c = 0; c < cols; ++c) {
          const float p = x.data<float>()[r * inner + i];
          if (wgrad) {
            add((group * inner + i) * cols + c, p, y.data<float>()[r * cols + c]);
          } else {
            const float* w = y.data<float>() + group * inner * cols;
            add(r * cols + c, p, kind == Kind::kForward ? w[c * inner + i] : w[i * cols + c]);
          }
        }
      }
    }
    exact.terms = std::max(exact.terms, wgrad ? offsets[e + 1] - offsets[e] : inner);
  }
  return exact;
}

void Multiply(const Context& ctx, Kind kind, const Operands& o, const Output& c) {
  switch (kind) {
    case Kind::kForward: return QuantizedGemmForward(ctx, o.x, o.w, c);
    case Kind::kDgrad: return QuantizedGemmDgrad(ctx, o.dy, o.w, c);
    case Kind::kWgrad: return QuantizedGemmWgrad(ctx, o.dy, o.x, c);
  }
}

TEST(QuantizedGemm, GroupedMxfp8AgreesWithTheGoldenProducts) {
  const testing::GoldenFile golden(std::string(CISTRON_SOURCE_DIR) +
                                   "/tests/golden/numerics2.safetensors");
  const Tensor& splits = golden.Get("grouped.in.split_sizes");
  const Operands o{Make(golden.Get("grouped.in.x"), splits, {}),
                   Make(golden.Get("grouped.in.w"), {}, {}),
                   Make(golden.Get("grouped.in.dy"), splits, {})};
  for (const auto& output :
       {std::pair{Kind::kForward, "y"}, {Kind::kDgrad, "dx"}, {Kind::kWgrad, "dw"}}) {
    const Kind kind = output.first;
    const char* name = output.second;
    SCOPED_TRACE(name);
    const Tensor& expected = golden.Get(std::string("grouped.mxfp8.") + name);
    const Exact exact = kind == Kind::kForward ? Reference(kind, o.x, o.w, expected.shape())
                        : kind == Kind::kDgrad ? Reference(kind, o.dy, o.w, expected.shape())
                                               : Reference(kind, o.dy, o.x, expected.shape());
    const QuantizedGemmProblem problem{
        kind, Scaling::kMxfp8, Scaling::kMxfp8, DType::kE4M3, DType::kE4M3, DType::kF32, 5, 96, 64,
        96};
    testing::ForEachImplementation(QuantizedGemmImpls(), problem, [&](const Context& ctx) {
      const Tensor c = ctx.Empty(expected.shape(), DType::kF32);
      FillPoison(c);
      Multiply(ctx, kind, o, Write(c));
      EXPECT_TRUE(Agrees(check::Compare(name, c, expected, [&](std::int64_t i) {
        return check::DotBound(exact.terms, exact.abs_sum.data<double>()[i], DType::kF32,
                               DType::kF32);
      })));
    });
  }
}

struct Recipe {
  const char* name;
  QuantizedLayout activation, weight, gradient;
};
const Recipe kRecipes[] = {
    {"mxfp8", {Scaling::kMxfp8}, {Scaling::kMxfp8}, {Scaling::kMxfp8}},
    {"mxfp8 square weights, e5m2 gradients",
     {Scaling::kMxfp8},
     {Scaling::kMxfp8Block32x32},
     {Scaling::kMxfp8, DType::kE5M2}},
    {"tensor, hybrid", {Scaling::kTensor}, {Scaling::kTensor}, {Scaling::kTensor, DType::kE5M2}},
    {"block", {Scaling::kBlock1x128}, {Scaling::kBlock128x128}, {Scaling::kBlock1x128}},
};

struct GroupCase {
  std::vector<std::int64_t> counts;
  std::int64_t n, k, parts;  // parts: gate and up apart along N
};
std::vector<GroupCase> GroupCases() {
  return {{{0, 1, 7, 33}, 24, 40, 1},
          {{0, 0, 50}, 2 * 33, 130, 2},  // parts that end within a block
          {{32, 32, 32}, 64, 32, 2},
          {{5, 260, 0, 1}, 2 * 70, 16, 2},
          {{0, 0}, 8, 8, 1}};
}

TEST(QuantizedGemm, EveryRecipeCountAndModeAgreesWithFp64) {
  for (const Recipe& recipe : kRecipes) {
    for (const GroupCase& g : GroupCases()) {
      SCOPED_TRACE(fmt::format("{} counts {} n {} k {} parts {}", recipe.name,
                               ::testing::PrintToString(g.counts), g.n, g.k, g.parts));
      const auto groups = static_cast<std::int64_t>(g.counts.size());
      const Tensor splits = Tensor::FromSpan<std::int64_t>({groups}, g.counts);
      std::int64_t used = 0;
      for (const std::int64_t n : g.counts) used += n;
      const std::int64_t rows = used + 3;  // rows of no group, whose values are NaN
      const auto with_nan_tail = [&](Tensor t) {
        FillPoison(t.Slice(0, used, 3));
        return t;
      };
      QuantizedLayout weight = recipe.weight, gradient = recipe.gradient;
      weight.row_parts = gradient.col_parts = g.parts;
      const Operands o{Make(with_nan_tail(testing::Normal({rows, g.k}, DType::kF32, "x")), splits,
                            recipe.activation),
                       Make(testing::Normal({groups, g.n, g.k}, DType::kF32, "w", 0.1), {}, weight),
                       Make(with_nan_tail(testing::Normal({rows, g.n}, DType::kF32, "dy", 3.0)),
                            splits, gradient)};
      for (const Kind kind : {Kind::kForward, Kind::kDgrad, Kind::kWgrad}) {
        const QuantizedTensor& a = kind == Kind::kForward ? o.x : o.dy;
        const QuantizedTensor& b = kind == Kind::kWgrad ? o.x : o.w;
        const Shape shape = kind == Kind::kForward ? Shape{rows, g.n}
                            : kind == Kind::kDgrad ? Shape{rows, g.k}
                                                   : Shape{groups, g.n, g.k};
        const Exact exact = Reference(kind, a, b, shape);
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          const QuantizedGemmProblem problem{kind,
                                             a.layout.scaling,
                                             b.layout.scaling,
                                             a.layout.format,
                                             b.layout.format,
                                             dtype,
                                             groups,
                                             rows,
                                             g.n,
                                             g.k};
          testing::ForEachImplementation(QuantizedGemmImpls(), problem, [&](const Context& ctx) {
            for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
              const Tensor c = ctx.Empty(shape, dtype);
              const Tensor before = testing::Normal(shape, dtype, "before");
              const bool add = mode == WriteMode::kAccumulate;
              FillPoison(c);
              const Tensor view = kind == Kind::kWgrad ? c : c.Slice(0, 0, used);
              if (add) Convert(kind == Kind::kWgrad ? before : before.Slice(0, 0, used), view);
              Multiply(ctx, kind, o, {c, mode});
              const Tensor expected = Tensor::Zeros(view.shape(), DType::kF64);
              for (std::int64_t i = 0; i < expected.numel(); ++i) {
                expected.data<double>()[i] =
                    exact.value.data<double>()[i] + (add ? ElementAsDouble(before, i) : 0.0);
              }
              // Two more roundings a term than a plain product: those of the two scales.
              EXPECT_TRUE(Agrees(check::Compare("c", view, expected, [&](std::int64_t i) {
                return check::DotBound(exact.terms + 3,
                                       exact.abs_sum.data<double>()[i] +
                                           (add ? std::abs(ElementAsDouble(before, i)) : 0.0),
                                       DType::kF32, dtype);
              })));
              if (kind != Kind::kWgrad) {
                EXPECT_TRUE(testing::IsPoisoned(c.Slice(0, used, 3)));
              }
            }
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace cistron::ops
