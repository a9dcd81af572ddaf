#include "cistron/ops/reduce/reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/reduce/reduce_cases.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using testing::ForEachImplementation;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};

double SumOf(const std::function<void(const Output&)>& op) {
  const Tensor out = Tensor::Scalar(kNaN);
  op(Write(out));
  return out.item();
}

void ForEachCase(const std::function<void(const Context&, const Tensor&)>& f) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t n : kReduceSizes) {
      SCOPED_TRACE(fmt::format("{} [{}]", Name(dtype), n));
      // The buffer is larger than the tensor and NaN beyond it.
      const Tensor x = testing::Pad(testing::Normal({n}, dtype, "x"), 33).used;
      ForEachImplementation(ReduceImpls(), ReduceProblem{dtype, n},
                            [&](const Context& ctx) { f(ctx, x); });
    }
  }
}

TEST(SumOfSquares, MatchesExactSum) {
  ForEachCase([](const Context& ctx, const Tensor& x) {
    double expected = 0;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      expected += ElementAsDouble(x, i) * ElementAsDouble(x, i);
    }
    // One rounding of each square in the compute type, n of the sum in f64, here and there.
    const double bound = (check::UnitRoundoff(ComputeType(x.dtype())) +
                          2 * check::Gamma(x.numel() + 1, DType::kF64)) *
                         expected;
    EXPECT_NEAR(SumOf([&](const Output& out) { SumOfSquares(ctx, x, out); }), expected, bound);
  });
}

TEST(SumOfSquares, SquaresInTheComputeType) {
  // 2^-80 squared underflows in f32 and not in f64: the square of an f32 is an f32.
  const std::vector<float> x32(40, 0x1p-80f);
  const std::vector<double> x64(40, 0x1p-80);
  ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF32, 40}, [&](const Context& ctx) {
    const Tensor x = Tensor::FromSpan<float>({40}, x32);
    EXPECT_EQ(SumOf([&](const Output& out) { SumOfSquares(ctx, x, out); }), 0);
  });
  ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF64, 40}, [&](const Context& ctx) {
    const Tensor x = Tensor::FromSpan<double>({40}, x64);
    EXPECT_EQ(SumOf([&](const Output& out) { SumOfSquares(ctx, x, out); }), 40 * 0x1p-160);
  });
}

TEST(SumOfSquares, AccumulatesAndLeavesEmpty) {
  for (const DType dtype : kDTypes) {
    ForEachImplementation(ReduceImpls(), ReduceProblem{dtype, 3}, [&](const Context& ctx) {
      const Tensor out = Tensor::Scalar(1.5);
      const Tensor three = Tensor::Empty({3}, dtype);
      Convert(Tensor::FromSpan<float>({3}, std::vector<float>{1, -2, 3}), three);
      SumOfSquares(ctx, three, Accumulate(out));
      EXPECT_EQ(out.item(), 15.5);
      const Tensor empty = Tensor::Empty({0, 4}, dtype);
      SumOfSquares(ctx, empty, Accumulate(out));
      EXPECT_EQ(out.item(), 15.5);
      SumOfSquares(ctx, empty, Write(out));
      EXPECT_EQ(out.item(), 0);
    });
  }
}

TEST(SumOfSquares, NanIsNotLost) {
  for (const std::int64_t position : {0, 4095, 4096, 4999}) {
    const Tensor x = testing::Normal({5000}, DType::kF32, "x");
    x.data<float>()[position] = std::numeric_limits<float>::quiet_NaN();
    ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF32, 5000}, [&](const Context& ctx) {
      EXPECT_TRUE(std::isnan(SumOf([&](const Output& out) { SumOfSquares(ctx, x, out); })));
    });
  }
}

TEST(WeightedSum, MatchesExactSum) {
  ForEachCase([](const Context& ctx, const Tensor& x) {
    for (const DType weight_dtype : {DType::kF32, DType::kF64}) {
      const Tensor w = testing::Uniform(x.shape(), weight_dtype, "w", 0.0, 2.0);
      double expected = 0, magnitude = 0;
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        const double term = ElementAsDouble(x, i) * ElementAsDouble(w, i);
        expected += term;
        magnitude += std::abs(term);
      }
      EXPECT_NEAR(SumOf([&](const Output& out) { WeightedSum(ctx, x, w, out); }), expected,
                  2 * check::Gamma(x.numel() + 1, DType::kF64) * magnitude);
    }
    double expected = 0, magnitude = 0;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      expected += ElementAsDouble(x, i);
      magnitude += std::abs(ElementAsDouble(x, i));
    }
    EXPECT_NEAR(SumOf([&](const Output& out) { WeightedSum(ctx, x, {}, out); }), expected,
                2 * check::Gamma(x.numel() + 1, DType::kF64) * magnitude);
  });
}

// Losses of parts with different token counts join to the token-weighted mean, not to a mean of
// means.
TEST(WeightedSum, MeanOfMeans) {
  const Tensor nll = Tensor::FromSpan<float>({5}, std::vector<float>{1, 1, 1, 1, 6});
  const Tensor w = Tensor::FromSpan<float>({5}, std::vector<float>{1, 1, 0.5, 1.5, 1});
  ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF32, 5}, [&](const Context& ctx) {
    const Tensor sum = Tensor::Scalar(kNaN), weight = Tensor::Scalar(kNaN);
    WeightedSum(ctx, nll.Slice(0, 0, 4), w.Slice(0, 0, 4), Write(sum));
    WeightedSum(ctx, nll.Slice(0, 4, 1), w.Slice(0, 4, 1), Accumulate(sum));
    WeightedSum(ctx, w.Slice(0, 0, 4), {}, Write(weight));
    WeightedSum(ctx, w.Slice(0, 4, 1), {}, Accumulate(weight));
    EXPECT_EQ(sum.item() / weight.item(), 2.0);  // 3.5 would be the mean of means
  });
}

TEST(AddTo, RoundsOnce) {
  ForEachCase([](const Context& ctx, const Tensor& x) {
    const testing::PaddedTensor y = testing::Pad(testing::Normal(x.shape(), x.dtype(), "y"), 17);
    const Tensor expected = y.used.Clone();
    DispatchFloat("test", x.dtype(), [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        T& e = expected.data<T>()[i];
        e = T(Compute<T>(e) + Compute<T>(x.data<T>()[i]));
      }
    });
    AddTo(ctx, x, y.used);
    EXPECT_TRUE(Agrees(check::CompareBitwise("y", y.used, expected)));
    EXPECT_TRUE(testing::IsPoisoned(y.tail));
  });
}

TEST(Reduce, DoesNotDependOnThreads) {
  ForEachCase([](const Context& ctx, const Tensor& x) {
    const Tensor w = testing::Uniform(x.shape(), DType::kF32, "w");
    std::vector<std::uint64_t> bits;
    for (const int threads : {1, 2, 3, 5}) {
      const testing::ThreadsForScope scope(threads);
      bits.push_back(std::bit_cast<std::uint64_t>(
          SumOf([&](const Output& out) { SumOfSquares(ctx, x, out); })));
      bits.push_back(std::bit_cast<std::uint64_t>(
          SumOf([&](const Output& out) { WeightedSum(ctx, x, w, out); })));
    }
    for (std::size_t i = 2; i < bits.size(); ++i) EXPECT_EQ(bits[i], bits[i - 2]);
  });
}

TEST(ClipFactor, ScalesOnlyLargeNorms) {
  const auto clip = [](double sum_of_squares, double max_norm) {
    const Tensor norm = Tensor::Scalar(kNaN), factor = Tensor::Scalar(kNaN);
    ClipFactor(Context(), Tensor::Scalar(sum_of_squares), max_norm, norm, factor);
    return std::pair(norm.item(), factor.item());
  };
  EXPECT_EQ(clip(16, 1), std::pair(4.0, 1 / (4 + 1e-6)));
  EXPECT_EQ(clip(0.25, 1), std::pair(0.5, 1.0));
  EXPECT_EQ(clip(0, 1), std::pair(0.0, 1.0));
  EXPECT_EQ(clip(std::numeric_limits<double>::infinity(), 1).second, 0.0);
  EXPECT_TRUE(std::isnan(clip(kNaN, 1).second));
  EXPECT_THROW(clip(1, 0), Error);
  EXPECT_THROW(clip(1, kNaN), Error);
}

TEST(Reduce, RefusesWrongArguments) {
  const Context ctx;
  const Tensor x = Tensor::Zeros({4}, DType::kF32);
  EXPECT_THROW(SumOfSquares(ctx, x, Write(Tensor::Zeros({1}, DType::kF64))), Error);
  EXPECT_THROW(SumOfSquares(ctx, Tensor::Zeros({4}, DType::kI32), Write(Tensor::Scalar(0))), Error);
  EXPECT_THROW(WeightedSum(ctx, x, Tensor::Zeros({3}, DType::kF32), Write(Tensor::Scalar(0))),
               Error);
  EXPECT_THROW(AddTo(ctx, x, Tensor::Zeros({4}, DType::kF64)), Error);
}

// The sum over many tensors, of several sizes and dtypes: within the bound of the exact sum, and
// the same bits at every call.
TEST(Reduce, SumOfSquaresOfAllTensors) {
  ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF64, 1}, [&](const Context& ctx) {
    std::vector<Tensor> tensors;
    double exact = 0;
    for (std::int64_t i = 0; i < 150; ++i) {
      const std::int64_t n = i % 11 == 0 ? 0 : i % 5 == 0 ? 12288 + i : 1 + 29 * i;
      const DType dtype = i % 3 == 0 ? DType::kBF16 : DType::kF32;
      tensors.push_back(testing::Normal({n}, dtype, "x"));
      for (std::int64_t k = 0; k < n; ++k) {
        const double x = ElementAsDouble(tensors.back(), k);
        exact += x * x;
      }
    }
    const Tensor out = Tensor::Scalar(NAN), again = Tensor::Scalar(3);
    SumOfSquaresOfAll(ctx, tensors, Write(out));
    // One rounding of each square in f32; the sums are in f64.
    EXPECT_NEAR(out.item(), exact, 2 * check::Gamma(1, DType::kF32) * exact);
    SumOfSquaresOfAll(ctx, tensors, Accumulate(again));
    EXPECT_EQ(again.item(), 3 + out.item());
    SumOfSquaresOfAll(ctx, {}, Write(out));
    EXPECT_EQ(out.item(), 0);
  });
}

// Once closed, a gate stays closed.
TEST(Reduce, GateStopsAnUpdateAndAllAfterIt) {
  ForEachImplementation(ReduceImpls(), ReduceProblem{DType::kF64, 1}, [&](const Context& ctx) {
    const Tensor gate = Tensor::Scalar(0), clip = Tensor::Scalar(0.5);
    const std::vector<double> good(300, 2.0);
    GateUpdate(ctx, Tensor::FromSpan<double>({300}, good), gate, clip);
    EXPECT_EQ(clip.item(), 0.5);
    std::vector<double> bad = good;
    bad[299] = INFINITY;
    GateUpdate(ctx, Tensor::FromSpan<double>({300}, bad), gate, clip);
    EXPECT_TRUE(std::isnan(clip.item()));
    *clip.data<double>() = 0.5;
    GateUpdate(ctx, Tensor::FromSpan<double>({300}, good), gate, clip);
    EXPECT_TRUE(std::isnan(clip.item()));
  });
}

}  // namespace
}  // namespace cistron::ops
