// quantized_gemm: every implementation against fp64 products of the decoded operands, under the
// derived bound, and against values made with numpy.
#include "cistron/ops/quantized_gemm/quantized_gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/ops/quantized_gemm/quantized_gemm_cases.h"
#include "cistron/ops/split_sizes.h"
#include "cistron/testing/golden_file.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

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
  auto* value = exact.value.data<double>();
  auto* abs_sum = exact.abs_sum.data<double>();
  const std::int64_t cols = shape[shape.rank() - 1], inner = a.shape[1];
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const auto group = static_cast<std::int64_t>(e);
    for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < inner; ++i) {
        const double p = x.data<float>()[r * inner + i];
        // Values of b that p meets, and where their products go.
        const float* q = y.data<float>() + (wgrad                    ? r * cols
                                            : kind == Kind::kForward ? group * inner * cols + i
                                                                     : (group * inner + i) * cols);
        const std::int64_t step = kind == Kind::kForward ? inner : 1;
        const std::int64_t to = wgrad ? (group * inner + i) * cols : r * cols;
        for (std::int64_t c = 0; c < cols; ++c) {
          const double product = p * static_cast<double>(q[c * step]);
          value[to + c] += product;
          abs_sum[to + c] += std::abs(product);
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

// Operands of a case; rows of no group, if there are any, hold poison.
struct Made {
  Operands operands;
  std::int64_t used, rows;
};
Made MakeCase(const QuantizedGemmRecipe& recipe, const QuantizedGemmCase& g) {
  const bool grouped = !g.counts.empty();
  const auto groups = static_cast<std::int64_t>(g.counts.size());
  const Tensor splits = grouped ? Tensor::FromSpan<std::int64_t>({groups}, g.counts) : Tensor();
  std::int64_t used = g.rows;
  for (const std::int64_t n : g.counts) used += n;
  const std::int64_t rows = grouped ? used + 3 : used;
  const auto with_nan_tail = [&](Tensor t) {
    FillPoison(t.Slice(0, used, rows - used));
    return t;
  };
  QuantizedLayout weight = recipe.weight, gradient = recipe.gradient;
  weight.row_parts = gradient.col_parts = g.parts;
  const Shape w = grouped ? Shape{groups, g.n, g.k} : Shape{g.n, g.k};
  return {
      {Make(with_nan_tail(testing::Normal({rows, g.k}, DType::kF32, "x")), splits,
            recipe.activation),
       Make(testing::Normal(w, DType::kF32, "w", 0.1), {}, weight),
       Make(with_nan_tail(testing::Normal({rows, g.n}, DType::kF32, "dy", 3.0)), splits, gradient)},
      used,
      rows};
}

// Checks one product under every implementation, mode and type of the result.
void ExpectProduct(Kind kind, const Operands& o, std::int64_t used) {
  const QuantizedTensor& a = kind == Kind::kForward ? o.x : o.dy;
  const QuantizedTensor& b = kind == Kind::kWgrad ? o.x : o.w;
  const std::int64_t rows = a.shape[0], groups = a.num_groups();
  const int last = o.w.shape.rank() - 1;
  const std::int64_t n = o.w.shape[last - 1], k = o.w.shape[last];
  const Shape shape = kind == Kind::kForward ? Shape{rows, n}
                      : kind == Kind::kDgrad ? Shape{rows, k}
                                             : o.w.shape;
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
                                       n,
                                       k};
    testing::ForEachImplementation(QuantizedGemmImpls(), problem, [&](const Context& ctx) {
      for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
        SCOPED_TRACE(fmt::format("kind {} {} {}", static_cast<int>(kind), Name(dtype),
                                 mode == WriteMode::kWrite ? "write" : "accumulate"));
        const bool add = mode == WriteMode::kAccumulate;
        const bool matrix = shape.rank() == 2;
        const std::int64_t in_use = kind == Kind::kWgrad ? shape[0] : used;
        const Tensor before = testing::Normal(shape, dtype, "before");
        FillPoison(before.Slice(0, in_use, shape[0] - in_use));
        // Rows of the result lie further apart than they are long, where it is a matrix.
        const testing::Strided strided(matrix ? shape : Shape{1, 1}, dtype);
        const Tensor c = matrix ? strided.view : ctx.Empty(shape, dtype);
        if (!matrix) FillPoison(c);
        if (add && matrix) strided.Assign(before);
        if (add && !matrix) Convert(before, c);
        Multiply(ctx, kind, o, {c, mode});
        const Tensor got = (matrix ? strided.Values() : c).Slice(0, 0, in_use);
        const Tensor expected = Tensor::Zeros(got.shape(), DType::kF64);
        for (std::int64_t i = 0; i < expected.numel(); ++i) {
          expected.data<double>()[i] =
              exact.value.data<double>()[i] + (add ? ElementAsDouble(before, i) : 0.0);
        }
        // Two more roundings a term than a plain product: those of the two scales.
        EXPECT_TRUE(Agrees(check::Compare("c", got, expected, [&](std::int64_t i) {
          return check::DotBound(
              exact.terms + 3,
              exact.abs_sum.data<double>()[i] + (add ? std::abs(ElementAsDouble(before, i)) : 0.0),
              DType::kF32, dtype);
        })));
        if (matrix) {
          EXPECT_TRUE(strided.UntouchedBeyond(in_use));
        }
      }
    });
  }
}

TEST(QuantizedGemm, EveryRecipeCountAndModeAgreesWithFp64) {
  for (const QuantizedGemmRecipe& recipe : kQuantizedGemmRecipes) {
    for (const QuantizedGemmCase& g : QuantizedGemmCases()) {
      SCOPED_TRACE(fmt::format("{} counts {} rows {} n {} k {} parts {}", recipe.name,
                               ::testing::PrintToString(g.counts), g.rows, g.n, g.k, g.parts));
      const Made made = MakeCase(recipe, g);
      for (const Kind kind : {Kind::kForward, Kind::kDgrad, Kind::kWgrad}) {
        ExpectProduct(kind, made.operands, made.used);
      }
    }
  }
}

// Scales at both ends of e8m0, where a decoded value is no bf16 or is one that the processor's bf16
// product takes for zero, and blocks of zeros, which have scale code 0.
TEST(QuantizedGemm, ScalesOutsideTheRangeOfBf16) {
  const auto at = [](const char* name, const Shape& shape, int exponent) {
    const Tensor t = testing::Normal(shape, DType::kF32, name);
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      t.data<float>()[i] = std::ldexp(t.data<float>()[i], exponent);
    }
    return t;
  };
  struct Exponents {
    int x, w;
  };
  // Subnormal values and large weights; large values; products that are subnormal of values that
  // are not; ordinary.
  for (const auto& [ex, ew] : {Exponents{-125, 100}, {122, -110}, {-66, -66}, {-110, 95}, {0, 0}}) {
    SCOPED_TRACE(fmt::format("x 2^{} w 2^{}", ex, ew));
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      const Tensor x = at("x", {40, 70}, ex), w = at("w", {36, 70}, ew), dy = at("dy", {40, 36}, 0);
      for (std::int64_t c = 0; c < 64; ++c) x.data<float>()[3 * 70 + c] = 0;
      const QuantizedLayout layout{Scaling::kMxfp8, format};
      const Operands o{Make(x, {}, layout), Make(w, {}, layout), Make(dy, {}, layout)};
      ExpectProduct(Kind::kForward, o, 40);
      ExpectProduct(Kind::kWgrad, o, 40);
    }
  }
}

// f32 scales that are no powers of two.
TEST(QuantizedGemm, BlocksWithScalesThatAreNoPowersOfTwo) {
  const Context ctx = Context().WithImpl("ref");
  const auto make = [&](const Tensor& t, Scaling scaling) {
    const QuantizedTensor q = EmptyQuantized(ctx, t.shape(), {}, {scaling}, {});
    Quantize(ctx, t, false, {}, q);
    return q;
  };
  const Operands o{make(testing::Normal({50, 150}, DType::kF32, "x"), Scaling::kBlock1x128),
                   make(testing::Normal({40, 150}, DType::kF32, "w"), Scaling::kBlock128x128),
                   make(testing::Normal({50, 40}, DType::kF32, "dy"), Scaling::kBlock1x128)};
  for (const Kind kind : {Kind::kForward, Kind::kDgrad, Kind::kWgrad}) ExpectProduct(kind, o, 50);
}

TEST(QuantizedGemm, NanStaysInItsRow) {
  const Tensor x = testing::Normal({9, 64}, DType::kF32, "x");
  x.data<float>()[2 * 64 + 5] = std::nanf("");
  const Operands o{Make(x, {}, {}), Make(testing::Normal({12, 64}, DType::kF32, "w"), {}, {}), {}};
  for (const char* impl : {"cpu", "ref"}) {
    const Context ctx = Context().WithImpl(impl);
    const Tensor y = ctx.Zeros({9, 12}, DType::kF32);
    QuantizedGemmForward(ctx, o.x, o.w, Write(y));
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      EXPECT_EQ(std::isnan(y.data<float>()[i]), i / 12 == 2) << impl << " " << i;
    }
  }
}

TEST(QuantizedGemmErrors, NameOpArgumentAndValues) {
  const Context ctx;
  const auto message = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  using ::testing::HasSubstr;
  const auto make = [&](const Shape& shape, const Tensor& splits, const QuantizedLayout& layout,
                        const QuantizeCopies& copies) {
    const QuantizedTensor q = EmptyQuantized(ctx, shape, splits, layout, copies);
    if (!splits) Quantize(ctx, testing::Normal(shape, DType::kF32, "t"), true, {}, q);
    return q;
  };
  const Tensor y = ctx.Zeros({8, 6}, DType::kF32);
  const QuantizedTensor x = make({8, 64}, {}, {}, {}), w = make({6, 64}, {}, {}, {});
  const QuantizedTensor columns = make({8, 64}, {}, {}, {false, true});
  EXPECT_THAT(message([&] { QuantizedGemmForward(ctx, columns, w, Write(y)); }),
              HasSubstr("quantized_gemm forward: the first operand (mxfp8 e4m3 [8, 64]) has no "
                        "row-wise copy"));
  EXPECT_THAT(message([&] {
                QuantizedGemmForward(ctx, x, make({6, 32}, {}, {}, {}), Write(y));
              }),
              HasSubstr("shapes do not fit"));
  EXPECT_THAT(message([&] {
                QuantizedGemmForward(ctx, x, make({6, 64}, {}, {Scaling::kTensor}, {}), Write(y));
              }),
              HasSubstr("scalings do not fit: mxfp8 e4m3 [8, 64] and tensor e4m3 [6, 64]"));
  EXPECT_THAT(message([&] {
                QuantizedLayout parts;
                parts.col_parts = 2;
                QuantizedGemmForward(ctx, make({8, 64}, {}, parts, {}), w, Write(y));
              }),
              HasSubstr("blocks restart in 2 parts"));
  EXPECT_THAT(message([&] {
                QuantizedGemmForward(ctx, x, w, Write(ctx.Zeros({8, 5}, DType::kF32)));
              }),
              HasSubstr("the result is f32 [8, 5], expected f32 or bf16 [8, 6]"));
  for (const auto& [counts, what] :
       {std::pair{std::vector<std::int64_t>{-2, 3}, "split_sizes[0] = -2 is negative"},
        {{8, std::numeric_limits<std::int64_t>::max()}, "sum to more than the 8 rows"}}) {
    const Tensor splits = Tensor::FromSpan<std::int64_t>({2}, counts);
    const QuantizedTensor grouped = make({8, 64}, splits, {}, {});
    const QuantizedTensor weights = make({2, 6, 64}, {}, {}, {});
    EXPECT_THAT(message([&] { QuantizedGemmForward(ctx, grouped, weights, Write(y)); }),
                HasSubstr(what));
  }
}

}  // namespace
}  // namespace cistron::ops
