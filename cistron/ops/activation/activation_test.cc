#include "cistron/ops/activation/activation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/check/bounds.h"
#include "cistron/ops/activation/activation_cases.h"
#include "cistron/ops/activation/swiglu_rows.h"
#include "cistron/testing/golden_file.h"
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

// Roundings on the way to one product: exp (within 1.25 ulp, 2.5 units of u), its argument (below),
// 1 + e, the division, 1 − σ, and up to eight products and sums.
constexpr std::int64_t kRoundings = 16;

// In bf16 a GPU rounds the argument of exp: σ is off by |a|·(1 − σ) units of u, twice as many with
// the constant that it multiplies, beside the kRoundings of all else.
bool RoundsArgument(const Context& ctx, DType dtype) {
  return ctx.device().type == DeviceType::kCuda && dtype == DType::kBF16;
}
double ArgumentError(double a, double sigma) {
  return 1 + 2 * std::abs(a) * (1 - sigma) / kRoundings;
}

// Exact values and the sizes of their terms, in f64, of one row-major problem.
struct Exact {
  Tensor y, dx, dscale;
  // Sums of absolute values that rounding errors are proportional to.
  Tensor y_size, dx_size, dscale_size;
};

Exact MakeExact(const Tensor& x, const Tensor& dy, const Tensor& scale, bool rounds_argument) {
  const std::int64_t rows = dy.dim(0), width = dy.dim(1);
  Exact exact{Tensor::Zeros({rows, width}, DType::kF64),
              Tensor::Zeros({rows, 2 * width}, DType::kF64),
              Tensor::Zeros({rows}, DType::kF64),
              Tensor::Zeros({rows, width}, DType::kF64),
              Tensor::Zeros({rows, 2 * width}, DType::kF64),
              Tensor::Zeros({rows}, DType::kF64)};
  const Context ref = Context().WithImpl("ref");
  const Tensor x64 = ConvertTo(x, DType::kF64), dy64 = ConvertTo(dy, DType::kF64);
  const Tensor scale64 = scale ? ConvertTo(scale, DType::kF64) : Tensor();
  SwiGluForward(ref, x64, scale64, {}, Write(exact.y));
  SwiGluBackward(ref, dy64, x64, scale64, {}, Write(exact.dx), Write(exact.dscale), {});
  for (std::int64_t i = 0; i < rows; ++i) {
    const double s = scale ? scale64.data<double>()[i] : 1;
    for (std::int64_t j = 0; j < width; ++j) {
      const double a = x64.data<double>()[i * 2 * width + j];
      const double b = x64.data<double>()[i * 2 * width + width + j];
      const double d = dy64.data<double>()[i * width + j];
      const double sigma = 1 / (1 + std::exp(-a));
      const double argument = rounds_argument ? ArgumentError(a, sigma) : 1;
      exact.y_size.data<double>()[i * width + j] = std::abs(a * sigma * b * s) * argument;
      // 1 + a·(1 − σ): the error of σ counts |a| times, whatever cancels.
      exact.dx_size.data<double>()[i * 2 * width + j] =
          std::abs(d * s * b * sigma) * (1 + std::abs(a)) * argument;
      exact.dx_size.data<double>()[i * 2 * width + width + j] =
          std::abs(d * s * a * sigma) * argument;
      exact.dscale_size.data<double>()[i] += std::abs(d * a * sigma * b) * argument;
    }
  }
  return exact;
}

// The vector kernel takes σ(a) as 0 below −88.3: absolute error at most 88.3·e^-88.3 < 2^-120 times
// |b·s·dy|, which stays below 2^4 here. The reference keeps subnormals; f64 is far from all
// that.
double UnderflowSlack(DType compute) {
  return compute == DType::kF64 ? 0x1p-1060 : 0x1p-115;
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

void CheckCase(const Context& ctx, const SwiGluCase& test, DType dtype, WriteMode mode) {
  SCOPED_TRACE(fmt::format("{} {} {} seed {}", test.name, Name(dtype),
                           mode == WriteMode::kWrite ? "write" : "accumulate",
                           testing::TestSeed()));
  const DType compute = ComputeType(dtype);
  const bool accumulate = mode == WriteMode::kAccumulate;
  const std::int64_t rows = test.rows, width = test.width, all_rows = rows + test.rows_beyond;
  const Tensor x = testing::Normal({rows, 2 * width}, dtype, "x", 3.0);
  const Tensor dy = testing::Normal({rows, width}, dtype, "dy");
  const Tensor scale = test.has_scale ? testing::Uniform({rows}, compute, "scale") : Tensor();
  const auto start = [&](const Shape& shape, DType type, const char* name) {
    return accumulate ? testing::Normal(shape, type, name) : Tensor::Zeros(shape, type);
  };
  const Tensor y0 = start({rows, width}, dtype, "y0");
  const Tensor dx0 = start({rows, 2 * width}, dtype, "dx0");
  const Tensor dscale0 = start({rows}, compute, "ds0");

  // One mode with rows that take whole vectors, the other with rows that do not.
  const auto margins = accumulate ? testing::Margins::kAligned : testing::Margins::kOdd;
  const auto padded = [&](const Tensor& values) {
    Strided s({all_rows, values.dim(1)}, values.dtype(), margins);
    s.Assign(values);
    return s;
  };
  const Strided sx = padded(x), sdy = padded(dy);
  testing::PaddedTensor sscale, dscale = testing::MakePadded({rows}, compute, test.rows_beyond + 1);
  if (scale) sscale = testing::Pad(scale, test.rows_beyond + 1);
  const Tensor row_scale = scale ? sscale.whole.Slice(0, 0, all_rows) : Tensor();
  const Strided y({all_rows, width}, dtype, margins), y_again({all_rows, width}, dtype, margins),
      dx({all_rows, 2 * width}, dtype, margins);
  if (accumulate) {
    y.Assign(y0);
    y_again.Assign(y0);
    dx.Assign(dx0);
    Convert(dscale0, dscale.used);
  }
  const std::int64_t counts[] = {rows / 2, 0, rows - rows / 2};
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, counts);
  SwiGluForward(ctx, sx.view, row_scale, splits, {y.view, mode});
  SwiGluBackward(ctx, sdy.view, sx.view, row_scale, splits, {dx.view, mode},
                 {dscale.whole.Slice(0, 0, all_rows), mode}, {y_again.view, mode});
  EXPECT_TRUE(y.UntouchedBeyond(rows));
  EXPECT_TRUE(y_again.UntouchedBeyond(rows));
  EXPECT_TRUE(dx.UntouchedBeyond(rows));
  EXPECT_TRUE(testing::IsPoisoned(dscale.tail));

  const Exact exact = MakeExact(x, dy, scale, RoundsArgument(ctx, dtype));
  const Tensor got_y = y.Values().Slice(0, 0, rows);
  EXPECT_TRUE(Agrees(check::Compare("swiglu.y", got_y, Sum(exact.y, y0),
                                    Bound(exact.y_size, y0, 1, compute, dtype))));
  EXPECT_TRUE(
      Agrees(check::CompareBitwise("swiglu.y again", y_again.Values().Slice(0, 0, rows), got_y)));
  EXPECT_TRUE(Agrees(check::Compare("swiglu.dx", dx.Values().Slice(0, 0, rows), Sum(exact.dx, dx0),
                                    Bound(exact.dx_size, dx0, 1, compute, dtype))));
  EXPECT_TRUE(
      Agrees(check::Compare("swiglu.dscale", dscale.used, Sum(exact.dscale, dscale0),
                            Bound(exact.dscale_size, dscale0, width + 1, compute, compute))));
}

TEST(SwiGlu, CasesAgreeWithExactFormulas) {
  for (const SwiGluCase& test : kSwiGluCases) {
    for (const DType dtype : kDTypes) {
      for (const WriteMode mode : kModes) {
        testing::ForEachImplementation(
            SwiGluImpls(), SwiGluProblem{dtype, test.rows + test.rows_beyond, test.width},
            [&](const Context& ctx) { CheckCase(ctx, test, dtype, mode); });
      }
    }
  }
}

// Outputs that do not fit the caches are stored past them, with the same bits: a row of the large
// problem is a problem of its own. Widths with and without whole lines.
TEST(SwiGlu, BeyondTheCaches) {
  for (const std::int64_t width : {320, 323}) {
    const std::int64_t rows = internal::kLastCacheBytes / (3 * width * 4) + 5;
    const Tensor x = Tensor::Empty({rows, 2 * width}, DType::kF32);
    const Tensor dy = Tensor::Empty({rows, width}, DType::kF32);
    const Tensor one_x = testing::Normal({4, 2 * width}, DType::kF32, "x", 3.0);
    const Tensor one_dy = testing::Normal({4, width}, DType::kF32, "dy");
    for (std::int64_t i = 0; i < rows; ++i) {
      Convert(one_x.Slice(0, i % 4, 1), x.Slice(0, i, 1));
      Convert(one_dy.Slice(0, i % 4, 1), dy.Slice(0, i, 1));
    }
    const auto run = [&](const Tensor& a, const Tensor& b) {
      std::vector<Tensor> out = {Tensor::Empty(b.shape(), DType::kF32),
                                 Tensor::Empty(a.shape(), DType::kF32),
                                 Tensor::Empty(b.shape(), DType::kF32)};
      for (const Tensor& t : out) FillPoison(t);
      SwiGluForward(Context(), a, {}, {}, Write(out[0]));
      SwiGluBackward(Context(), b, a, {}, {}, Write(out[1]), {}, Write(out[2]));
      return out;
    };
    const std::vector<Tensor> large = run(x, dy), small = run(one_x, one_dy);
    for (std::size_t i = 0; i < large.size(); ++i) {
      for (const std::int64_t row : {std::int64_t{0}, rows / 2, rows - 1}) {
        EXPECT_TRUE(Agrees(
            check::CompareBitwise("row", large[i].Slice(0, row, 1), small[i].Slice(0, row % 4, 1))))
            << "width " << width << ", output " << i;
      }
    }
  }
}

// All bf16 gates, from −3.4e38 to 3.4e38, zeros, Inf and NaN, in f32 and bf16.
TEST(SwiGlu, AllBf16Gates) {
  constexpr std::int64_t kRows = 256, kWidth = 256;
  const Tensor x = Tensor::Empty({kRows, 2 * kWidth}, DType::kBF16);
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 0; j < kWidth; ++j) {
      x.data<bf16>()[i * 2 * kWidth + j] = bf16::FromBits(static_cast<std::uint16_t>(i * 256 + j));
      x.data<bf16>()[i * 2 * kWidth + kWidth + j] = bf16(0.5f);
    }
  }
  const Tensor dy = Tensor::Empty({kRows, kWidth}, DType::kBF16);
  for (bf16& v : dy.span<bf16>()) v = bf16(1.0f);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Tensor xt = ConvertTo(x, dtype), dyt = ConvertTo(dy, dtype);
    const Tensor zeros = Tensor::Zeros({kRows, 2 * kWidth}, DType::kF32);
    testing::ForEachImplementation(
        SwiGluImpls(), SwiGluProblem{dtype, kRows, kWidth}, [&](const Context& ctx) {
          const Exact exact = MakeExact(x, dy, {}, RoundsArgument(ctx, dtype));
          const Tensor y = Tensor::Empty({kRows, kWidth}, dtype);
          const Tensor dx = Tensor::Empty({kRows, 2 * kWidth}, dtype);
          SwiGluForward(ctx, xt, {}, {}, Write(y));
          SwiGluBackward(ctx, dyt, xt, {}, {}, Write(dx), {}, {});
          // checked below.
          EXPECT_TRUE(Agrees(check::Compare("swiglu.y", y, exact.y,
                                            Bound(exact.y_size, zeros, 0, DType::kF32, dtype))));
          EXPECT_TRUE(Agrees(check::Compare("swiglu.dx", dx, exact.dx,
                                            Bound(exact.dx_size, zeros, 0, DType::kF32, dtype))));
        });
  }
}

TEST(SwiGlu, GradientByCentralDifferences) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor x = testing::Normal({5, 12}, DType::kF64, "x", 2.0);
  const Tensor scale = testing::Uniform({5}, DType::kF64, "scale");
  const Tensor dy = testing::Normal({5, 6}, DType::kF64, "dy");
  const auto loss = [&] {
    const Tensor y = Tensor::Empty({5, 6}, DType::kF64);
    SwiGluForward(ctx, x, scale, {}, Write(y));
    double sum = 0;
    for (std::int64_t i = 0; i < y.numel(); ++i) sum += y.data<double>()[i] * dy.data<double>()[i];
    return sum;
  };
  const Tensor dx = Tensor::Empty({5, 12}, DType::kF64);
  const Tensor dscale = Tensor::Empty({5}, DType::kF64);
  SwiGluBackward(ctx, dy, x, scale, {}, Write(dx), Write(dscale), {});
  EXPECT_TRUE(Agrees(testing::CheckGradient("swiglu.dx", loss, x, dx)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("swiglu.dscale", loss, scale, dscale)));
}

// Golden inputs are f64: rounded to f32 first, then within 1e-6 of the tensor's maximum.
TEST(SwiGlu, GoldenValues) {
  const testing::GoldenFile golden(std::string(CISTRON_SOURCE_DIR) +
                                   "/tests/golden/numerics.safetensors");
  int found = 0;
  for (const std::string& name : golden.Names("scaled_swiglu.")) {
    if (!name.ends_with(".in.x")) continue;
    const std::string prefix = name.substr(0, name.size() - 4);
    SCOPED_TRACE(prefix);
    ++found;
    const Tensor x = ConvertTo(golden.Get(prefix + "in.x"), DType::kF32);
    const Tensor dy = ConvertTo(golden.Get(prefix + "in.dy"), DType::kF32);
    const Tensor scale =
        ConvertTo(golden.Get(prefix + "in.scale"), DType::kF32).Reshape({x.dim(0)});
    testing::ForEachImplementation(
        SwiGluImpls(), SwiGluProblem{DType::kF32, dy.dim(0), dy.dim(1)}, [&](const Context& ctx) {
          const Tensor y = Tensor::Empty(dy.shape(), DType::kF32);
          const Tensor dx = Tensor::Empty(x.shape(), DType::kF32);
          const Tensor dscale = Tensor::Empty({x.dim(0)}, DType::kF32);
          SwiGluForward(ctx, x, scale, {}, Write(y));
          SwiGluBackward(ctx, dy, x, scale, {}, Write(dx), Write(dscale), {});
          EXPECT_TRUE(Agrees(check::CompareToMaximum("y", y, golden.Get(prefix + "y"), 1e-6)));
          EXPECT_TRUE(Agrees(check::CompareToMaximum("dx", dx, golden.Get(prefix + "dx"), 1e-6)));
          EXPECT_TRUE(Agrees(check::CompareToMaximum(
              "dscale", dscale, golden.Get(prefix + "dscale").Reshape({x.dim(0)}), 1e-6)));
        });
  }
  EXPECT_GT(found, 0);
}

// atomics: dscale is a sum in a fixed order, the same bits on any number of threads.
TEST(SwiGlu, Atomics) {
  const Tensor x = testing::Normal({400, 2 * 77}, DType::kF32, "x");
  const Tensor dy = testing::Normal({400, 77}, DType::kF32, "dy");
  const auto run = [&](int threads) {
    const testing::ThreadsForScope scope(threads);
    const Tensor dx = Tensor::Empty(x.shape(), DType::kF32);
    const Tensor dscale = Tensor::Empty({400}, DType::kF32);
    SwiGluBackward(Context(), dy, x, {}, {}, Write(dx), Write(dscale), {});
    return std::pair(dx, dscale);
  };
  const auto [dx, dscale] = run(1);
  for (const int threads : {1, 2, 3, 4}) {
    const auto [dx_again, dscale_again] = run(threads);
    EXPECT_TRUE(Agrees(check::CompareBitwise("dx", dx_again, dx)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dscale", dscale_again, dscale)));
  }
}

TEST(SwiGlu, ErrorsNameTheTensor) {
  const Context ctx;
  const Tensor x = Tensor::Zeros({4, 6}, DType::kF32);
  const auto message = [&](const Tensor& input, const Tensor& scale, const Tensor& y) {
    try {
      SwiGluForward(ctx, input, scale, {}, Write(y));
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  using ::testing::HasSubstr;
  const Tensor y = Tensor::Zeros({4, 3}, DType::kF32);
  EXPECT_THAT(message(x, {}, Tensor::Zeros({4, 6}, DType::kF32)), HasSubstr("y is f32 [4, 6]"));
  EXPECT_THAT(message(x, Tensor::Zeros({4}, DType::kF64), y), HasSubstr("row_scale is f64 [4]"));
  EXPECT_THAT(message(Tensor::Zeros({4, 5}, DType::kF32), {}, y), HasSubstr("x is f32 [4, 5]"));
}

}  // namespace
}  // namespace cistron::ops
