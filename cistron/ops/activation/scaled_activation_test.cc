#include "cistron/ops/activation/scaled_activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "cistron/check/bounds.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/activation/activation_cases.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"
#include "cistron/testing/strided.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::Strided;

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};
constexpr WriteMode kModes[] = {WriteMode::kWrite, WriteMode::kAccumulate};

std::int64_t Columns(const ActivationConfig& config, std::int64_t width) {
  return IsGated(config.kind) ? 2 * width : width;
}

// Column of the gate and of the up of element j.
std::pair<std::int64_t, std::int64_t> Places(const ActivationConfig& config, std::int64_t width,
                                             std::int64_t j) {
  const std::int64_t g = config.glu_interleave_size;
  if (g == 0) return {j, IsGated(config.kind) ? width + j : j};
  const std::int64_t gate = 2 * g * (j / g) + j % g;
  return {gate, gate + g};
}

// The derivative of the argument of σ counts in the error of σ by as much as the argument is large.
double SigmaArgument(const ActivationConfig& config, double a) {
  switch (config.kind) {
    case ActivationKind::kSwiGlu: return a;
    case ActivationKind::kClampedSwiGlu: return config.alpha * std::min(a, config.limit);
    case ActivationKind::kGeGlu:
      return 2 * std::sqrt(2 / std::numbers::pi) * (a + 0.044715 * a * a * a);
    case ActivationKind::kSRelu: return 0;
  }
  return 0;
}

// Exact values by the reference in f64 and the sizes of their terms.
struct Exact {
  Tensor y, dx, dscale;
  Tensor y_size, dx_size, dscale_size;
};

Exact MakeExact(const ActivationConfig& config, const Tensor& x, const Tensor& dy,
                const Tensor& scale) {
  const std::int64_t rows = dy.dim(0), width = dy.dim(1), columns = Columns(config, width);
  const auto zeros = [](const Shape& shape) { return Tensor::Zeros(shape, DType::kF64); };
  Exact exact{zeros({rows, width}), zeros({rows, columns}), zeros({rows}),
              zeros({rows, width}), zeros({rows, columns}), zeros({rows})};
  const Context ref = Context().WithImpl("ref");
  const Tensor x64 = ConvertTo(x, DType::kF64), dy64 = ConvertTo(dy, DType::kF64);
  const Tensor scale64 = scale ? ConvertTo(scale, DType::kF64) : Tensor();
  ScaledActivationForward(ref, config, x64, scale64, {}, Write(exact.y));
  ScaledActivationBackward(ref, config, dy64, x64, scale64, {}, Write(exact.dx),
                           Write(exact.dscale), {});
  for (std::int64_t i = 0; i < rows; ++i) {
    const double s = scale ? scale64.data<double>()[i] : 1;
    for (std::int64_t j = 0; j < width; ++j) {
      const auto [gate, up] = Places(config, width, j);
      const double a = x64.data<double>()[i * columns + gate];
      const double b = x64.data<double>()[i * columns + up];
      const double d = dy64.data<double>()[i * width + j];
      const double z = std::clamp(SigmaArgument(config, a), -1e4, 1e4);
      const double sigma = 1 / (1 + std::exp(-z));
      // σ's relative error grows with |z|; terms of the slope and of b + 1 may cancel.
      const double error = 1 + std::abs(z) * (1 - sigma);
      const bool srelu = config.kind == ActivationKind::kSRelu;
      const double g = srelu ? std::max(a, 0.0) * std::max(a, 0.0) : std::abs(a * sigma) * error;
      const double u = srelu                                           ? 1
                       : config.kind == ActivationKind::kClampedSwiGlu ? std::abs(b) + 1
                                                                       : std::abs(b);
      const double slope =
          srelu ? 2 * std::max(a, 0.0) : sigma * error * (1 + 3 * std::abs(z)) * error;
      exact.y_size.data<double>()[i * width + j] = g * u * std::abs(s);
      exact.dx_size.data<double>()[i * columns + up] = std::abs(d * s) * g;
      exact.dx_size.data<double>()[i * columns + gate] = std::abs(d * s) * u * slope;
      exact.dscale_size.data<double>()[i] += std::abs(d) * g * u;
    }
  }
  return exact;
}

// Roundings on the way to one product: exp (within 1.25 ulp, 2.5 units of u), its argument (up to
// five), 1 + e, the division, 1 − σ, and up to eight products and sums.
constexpr std::int64_t kRoundings = 20;

// The vector kernel takes σ as 0 below −88: absolute error at most 120·2^-127·|b·s·dy|, and that
// product stays below 2^8 here. The reference keeps subnormals.
double UnderflowSlack(DType compute) {
  return compute == DType::kF64 ? 0x1p-1020 : 0x1p-110;
}

std::function<double(std::int64_t)> Bound(const Tensor& size, const Tensor& start,
                                          std::int64_t more_roundings, DType compute, DType out) {
  return [=](std::int64_t i) {
    const double sum = ElementAsDouble(size, i) + std::abs(ElementAsDouble(start, i));
    return check::DotBound(kRoundings + more_roundings, sum, compute, out) +
           UnderflowSlack(compute) +
           check::DotBound(kRoundings + more_roundings, sum, DType::kF64, DType::kF64);
  };
}

Tensor Sum(const Tensor& a, const Tensor& b) {
  Tensor sum = ConvertTo(a, DType::kF64);
  for (std::int64_t i = 0; i < sum.numel(); ++i) {
    sum.data<double>()[i] += ElementAsDouble(b, i);
  }
  return sum;
}

// Inputs away from the clamps by more than a rounding: bf16 values of x and the limits are exact,
// so that f32 and f64 agree on which side an element is.
void CheckCase(const ActivationConfig& config, const SwiGluCase& test, DType dtype,
               WriteMode mode) {
  SCOPED_TRACE(fmt::format(
      "{} interleave {} {} {} {} seed {}", Name(config.kind), config.glu_interleave_size, test.name,
      Name(dtype), mode == WriteMode::kWrite ? "write" : "accumulate", testing::TestSeed()));
  const DType compute = ComputeType(dtype);
  const bool accumulate = mode == WriteMode::kAccumulate;
  const std::int64_t rows = test.rows, width = test.width, all_rows = rows + test.rows_beyond;
  const std::int64_t columns = Columns(config, width);
  const Tensor x = testing::Normal({rows, columns}, dtype, "x", 4.0);
  const Tensor dy = testing::Normal({rows, width}, dtype, "dy");
  const Tensor scale = test.has_scale ? testing::Uniform({rows}, compute, "scale") : Tensor();
  const auto start = [&](const Shape& shape, DType type, const char* name) {
    return accumulate ? testing::Normal(shape, type, name) : Tensor::Zeros(shape, type);
  };
  const Tensor y0 = start({rows, width}, dtype, "y0");
  const Tensor dx0 = start({rows, columns}, dtype, "dx0");
  const Tensor dscale0 = start({rows}, compute, "ds0");

  // One mode with rows that take whole vectors, the other with rows that do not.
  const auto margins = accumulate ? testing::Margins::kAligned : testing::Margins::kOdd;
  const auto padded = [&](const Tensor& values) {
    Strided s({all_rows, values.dim(1)}, values.dtype(), margins);
    s.Assign(values);
    return s;
  };
  const Strided sx = padded(x), sdy = padded(dy);
  testing::PaddedTensor sscale;
  if (scale) sscale = testing::Pad(scale, test.rows_beyond + 1);
  const Tensor row_scale = scale ? sscale.whole.Slice(0, 0, all_rows) : Tensor();
  const std::int64_t counts[] = {rows / 2, 0, rows - rows / 2};
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, counts);
  const Exact exact = MakeExact(config, x, dy, scale);
  const ScaledActivationProblem problem{dtype, config, all_rows, width};
  testing::ForEachImplementation(ScaledActivationImpls(), problem, [&](const Context& ctx) {
    const testing::PaddedTensor dscale = testing::MakePadded({rows}, compute, test.rows_beyond + 1);
    const Strided y({all_rows, width}, dtype, margins), y_again({all_rows, width}, dtype, margins),
        dx({all_rows, columns}, dtype, margins);
    if (accumulate) {
      y.Assign(y0);
      y_again.Assign(y0);
      dx.Assign(dx0);
      Convert(dscale0, dscale.used);
    }
    ScaledActivationForward(ctx, config, sx.view, row_scale, splits, {y.view, mode});
    ScaledActivationBackward(ctx, config, sdy.view, sx.view, row_scale, splits, {dx.view, mode},
                             {dscale.whole.Slice(0, 0, all_rows), mode}, {y_again.view, mode});
    EXPECT_TRUE(y.UntouchedBeyond(rows));
    EXPECT_TRUE(y_again.UntouchedBeyond(rows));
    EXPECT_TRUE(dx.UntouchedBeyond(rows));
    EXPECT_TRUE(testing::IsPoisoned(dscale.tail));

    const Tensor got_y = y.Values().Slice(0, 0, rows);
    EXPECT_TRUE(Agrees(
        check::Compare("y", got_y, Sum(exact.y, y0), Bound(exact.y_size, y0, 1, compute, dtype))));
    EXPECT_TRUE(
        Agrees(check::CompareBitwise("y again", y_again.Values().Slice(0, 0, rows), got_y)));
    EXPECT_TRUE(Agrees(check::Compare("dx", dx.Values().Slice(0, 0, rows), Sum(exact.dx, dx0),
                                      Bound(exact.dx_size, dx0, 1, compute, dtype))));
    EXPECT_TRUE(
        Agrees(check::Compare("dscale", dscale.used, Sum(exact.dscale, dscale0),
                              Bound(exact.dscale_size, dscale0, width + 1, compute, compute))));
  });
}

TEST(ScaledActivation, CasesAgreeWithExactFormulas) {
  for (const ActivationKind kind : kActivationKinds) {
    for (const SwiGluCase& test : kSwiGluCases) {
      for (const std::int64_t g : {0, 1, 3, 32}) {
        if (g > 0 && (!IsGated(kind) || test.width % g != 0)) continue;
        if (kind != ActivationKind::kClampedSwiGlu && test.rows > 100) continue;  // time
        const ActivationConfig config{.kind = kind, .glu_interleave_size = g, .limit = 3.5};
        for (const DType dtype : kDTypes) {
          for (const WriteMode mode : kModes) CheckCase(config, test, dtype, mode);
        }
      }
    }
  }
}

// The formulas written once more, by hand, at points on each side of every bend; a clamp passes the
// gradient at its limit. Values of the tanh GELU: torch.nn.functional.gelu(approximate="tanh").
TEST(ScaledActivation, KnownValues) {
  const auto forward = [](const ActivationConfig& config, double a, double b) {
    const std::vector<double> x = IsGated(config.kind) ? std::vector{a, b} : std::vector{a};
    const Tensor y = Tensor::Empty({1, 1}, DType::kF64);
    ScaledActivationForward(Context(), config,
                            Tensor::FromSpan<double>({1, static_cast<std::int64_t>(x.size())}, x),
                            {}, {}, Write(y));
    return y.data<double>()[0];
  };
  const auto gradient = [](const ActivationConfig& config, double a, double b) {
    const std::vector<double> x = IsGated(config.kind) ? std::vector{a, b} : std::vector{a};
    const Shape shape = {1, static_cast<std::int64_t>(x.size())};
    const Tensor dx = Tensor::Empty(shape, DType::kF64), dy = Tensor::Empty({1, 1}, DType::kF64);
    dy.data<double>()[0] = 1;
    ScaledActivationBackward(Context(), config, dy, Tensor::FromSpan<double>(shape, x), {}, {},
                             Write(dx), {}, {});
    const auto values = dx.span<double>();
    return std::vector<double>(values.begin(), values.end());
  };
  const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
  const ActivationConfig clamped{.kind = ActivationKind::kClampedSwiGlu};
  EXPECT_NEAR(forward(clamped, 2, 3), 4 * 2 * sigmoid(1.702 * 2), 1e-14);
  EXPECT_NEAR(forward(clamped, 9, 3), 4 * 7 * sigmoid(1.702 * 7), 1e-14);
  EXPECT_NEAR(forward(clamped, -9, -8), -6 * -9 * sigmoid(1.702 * -9), 1e-14);
  EXPECT_NEAR(forward(clamped, 1, 8), 8 * sigmoid(1.702), 1e-14);
  EXPECT_EQ(gradient(clamped, 9, 3)[0], 0);
  EXPECT_GT(gradient(clamped, 7, 3)[0], 0);
  EXPECT_EQ(gradient(clamped, 2, 8)[1], 0);
  EXPECT_EQ(gradient(clamped, 2, -8)[1], 0);
  EXPECT_GT(gradient(clamped, 2, 7)[1], 0);
  const ActivationConfig geglu{.kind = ActivationKind::kGeGlu};
  EXPECT_NEAR(forward(geglu, 1, 1), 0.8411919906082768, 1e-14);
  EXPECT_NEAR(forward(geglu, -0.5, 2), 2 * -0.15428599017485644, 1e-12);
  const ActivationConfig srelu{.kind = ActivationKind::kSRelu};
  EXPECT_EQ(forward(srelu, 3, 0), 9);
  EXPECT_EQ(forward(srelu, -3, 0), 0);
  EXPECT_EQ(gradient(srelu, 3, 0)[0], 6);
  EXPECT_EQ(gradient(srelu, -3, 0)[0], 0);
}

TEST(ScaledActivation, GradientByCentralDifferences) {
  for (const ActivationKind kind : kActivationKinds) {
    SCOPED_TRACE(Name(kind));
    const ActivationConfig config{.kind = kind, .glu_interleave_size = IsGated(kind) ? 3 : 0};
    const Context ctx;
    const Shape shape = {5, Columns(config, 6)};
    const Tensor x = testing::Normal(shape, DType::kF64, "x");
    const Tensor scale = testing::Uniform({5}, DType::kF64, "scale");
    const Tensor dy = testing::Normal({5, 6}, DType::kF64, "dy");
    const auto loss = [&] {
      const Tensor y = Tensor::Empty({5, 6}, DType::kF64);
      ScaledActivationForward(ctx, config, x, scale, {}, Write(y));
      double sum = 0;
      for (std::int64_t i = 0; i < y.numel(); ++i) {
        sum += y.data<double>()[i] * dy.data<double>()[i];
      }
      return sum;
    };
    const Tensor dx = Tensor::Empty(shape, DType::kF64);
    const Tensor dscale = Tensor::Empty({5}, DType::kF64);
    ScaledActivationBackward(ctx, config, dy, x, scale, {}, Write(dx), Write(dscale), {});
    EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, x, dx)));
    EXPECT_TRUE(Agrees(testing::CheckGradient("dscale", loss, scale, dscale)));
  }
}

// Interleaving moves columns: the same bits in other places. Plain SwiGLU is that of activation.h.
TEST(ScaledActivation, InterleavingMovesValuesOnly) {
  constexpr std::int64_t kRows = 9, kWidth = 96;
  for (const ActivationKind kind : kActivationKinds) {
    if (!IsGated(kind)) continue;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor plain = testing::Normal({kRows, 2 * kWidth}, dtype, "x", 4.0);
      const Tensor dy = testing::Normal({kRows, kWidth}, dtype, "dy");
      const Tensor scale = testing::Uniform({kRows}, DType::kF32, "scale");
      const auto moved = [&](const Tensor& from, const ActivationConfig& config, bool back) {
        const Tensor x = ConvertTo(from, DType::kF64), to = Tensor::Empty(x.shape(), DType::kF64);
        for (std::int64_t i = 0; i < kRows; ++i) {
          for (std::int64_t j = 0; j < kWidth; ++j) {
            const auto [gate, up] = Places(config, kWidth, j);
            for (const auto& [p, q] : {std::pair{j, gate}, {kWidth + j, up}}) {
              const std::int64_t base = i * 2 * kWidth;
              to.data<double>()[base + (back ? p : q)] = x.data<double>()[base + (back ? q : p)];
            }
          }
        }
        return ConvertTo(to, dtype);
      };
      const auto run = [&](const ActivationConfig& config, const Tensor& x) {
        std::vector<Tensor> out = {Tensor::Empty(dy.shape(), dtype),
                                   Tensor::Empty(x.shape(), dtype)};
        ScaledActivationForward(Context(), config, x, scale, {}, Write(out[0]));
        ScaledActivationBackward(Context(), config, dy, x, scale, {}, Write(out[1]), {}, {});
        return out;
      };
      const std::vector<Tensor> expected = run({.kind = kind}, plain);
      if (kind == ActivationKind::kSwiGlu) {
        const Tensor y = Tensor::Empty(dy.shape(), dtype);
        SwiGluForward(Context(), plain, scale, {}, Write(y));
        EXPECT_TRUE(Agrees(check::CompareBitwise("swiglu", expected[0], y)));
      }
      for (const std::int64_t g : {1, 8, 32, 96}) {
        const ActivationConfig config{.kind = kind, .glu_interleave_size = g};
        const std::vector<Tensor> got = run(config, moved(plain, config, false));
        EXPECT_TRUE(Agrees(check::CompareBitwise("y", got[0], expected[0])));
        EXPECT_TRUE(Agrees(check::CompareBitwise("dx", moved(got[1], config, true), expected[1])));
      }
    }
  }
}

// All bf16 gates, from −3.4e38 to 3.4e38, zeros, Inf and NaN: classes as in the reference, finite
// results where it has them.
TEST(ScaledActivation, AllBf16Gates) {
  constexpr std::int64_t kRows = 256, kWidth = 256;
  for (const ActivationKind kind : kActivationKinds) {
    SCOPED_TRACE(Name(kind));
    const ActivationConfig config{.kind = kind};
    const std::int64_t columns = Columns(config, kWidth);
    const Tensor x = Tensor::Empty({kRows, columns}, DType::kF32);
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kWidth; ++j) {
        const auto [gate, up] = Places(config, kWidth, j);
        x.data<float>()[i * columns + up] = 0.5f;
        const auto bits = static_cast<std::uint16_t>(i * 256 + j);
        x.data<float>()[i * columns + gate] = static_cast<float>(bf16::FromBits(bits));
      }
    }
    const Tensor dy = Tensor::Empty({kRows, kWidth}, DType::kF32);
    for (float& v : dy.span<float>()) v = 1.0f;
    // Squares of the largest gates overflow f32 and not f64.
    Exact exact = MakeExact(config, x, dy, {});
    exact.y = ConvertTo(ConvertTo(exact.y, DType::kF32), DType::kF64);
    exact.dx = ConvertTo(ConvertTo(exact.dx, DType::kF32), DType::kF64);
    const Tensor zeros = Tensor::Zeros({kRows, columns}, DType::kF32);
    testing::ForEachImplementation(
        ScaledActivationImpls(), ScaledActivationProblem{DType::kF32, config, kRows, kWidth},
        [&](const Context& ctx) {
          const Tensor y = Tensor::Empty({kRows, kWidth}, DType::kF32);
          const Tensor dx = Tensor::Empty({kRows, columns}, DType::kF32);
          ScaledActivationForward(ctx, config, x, {}, {}, Write(y));
          ScaledActivationBackward(ctx, config, dy, x, {}, {}, Write(dx), {}, {});
          EXPECT_TRUE(Agrees(check::Compare(
              "y", y, exact.y, Bound(exact.y_size, zeros, 1, DType::kF32, DType::kF32))));
          EXPECT_TRUE(Agrees(check::Compare(
              "dx", dx, exact.dx, Bound(exact.dx_size, zeros, 1, DType::kF32, DType::kF32))));
        });
  }
}

TEST(ScaledActivation, ErrorsNameTheOpAndTheValue) {
  const auto message = [](const ActivationConfig& config, std::int64_t columns,
                          std::int64_t width) {
    try {
      ScaledActivationForward(Context(), config, Tensor::Zeros({4, columns}, DType::kF32), {}, {},
                              Write(Tensor::Zeros({4, width}, DType::kF32)));
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(message({.kind = ActivationKind::kGeGlu, .glu_interleave_size = 4}, 20, 10),
              HasSubstr("geglu forward: glu_interleave_size = 4 does not divide F = 10"));
  EXPECT_THAT(message({.kind = ActivationKind::kSRelu, .glu_interleave_size = 2}, 10, 10),
              HasSubstr("has no up columns"));
  EXPECT_THAT(message({.kind = ActivationKind::kGeGlu, .glu_interleave_size = -1}, 20, 10),
              HasSubstr("glu_interleave_size is -1"));
  EXPECT_THAT(message({.kind = ActivationKind::kClampedSwiGlu, .limit = 0}, 20, 10),
              HasSubstr("limit = 0"));
  EXPECT_THAT(message({.kind = ActivationKind::kGeGlu}, 5, 2), HasSubstr("x is f32 [4, 5]"));
  EXPECT_THAT(message({.kind = ActivationKind::kSRelu}, 5, 4), HasSubstr("y is f32 [4, 4]"));
}

}  // namespace
}  // namespace cistron::ops
