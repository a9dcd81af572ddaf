// The comparator is itself tested to fail: every class of difference that must not pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"

namespace cistron::check {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kHuge = std::numeric_limits<double>::max();

Tensor Of(const std::vector<float>& v) {
  return Tensor::FromSpan<float>({static_cast<std::int64_t>(v.size())}, v);
}

TEST(Compare, NanMatchesOnlyNan) {
  EXPECT_FALSE(Compare("x", Of({kNan}), Of({1.0f}), kHuge));
  EXPECT_FALSE(Compare("x", Of({1.0f}), Of({kNan}), kHuge));
  EXPECT_FALSE(Compare("x", Of({kNan}), Of({kInf}), kHuge));
  EXPECT_FALSE(Compare("x", Of({kInf}), Of({kNan}), kHuge));
  EXPECT_TRUE(Compare("x", Of({kNan}), Of({kNan}), 0));
  EXPECT_TRUE(Compare("x", Of({kNan}), Of({-kNan}), 0));
}

TEST(Compare, InfinityMatchesOnlyItsOwnSign) {
  EXPECT_FALSE(Compare("x", Of({kInf}), Of({-kInf}), kHuge));
  EXPECT_FALSE(Compare("x", Of({kInf}), Of({3e38f}), kHuge));
  EXPECT_FALSE(Compare("x", Of({-3e38f}), Of({-kInf}), kHuge));
  EXPECT_TRUE(Compare("x", Of({kInf, -kInf}), Of({kInf, -kInf}), 0));
  // An infinite bound admits any finite value and still no other class.
  EXPECT_FALSE(Compare("x", Of({kInf}), Of({0.0f}), std::numeric_limits<double>::infinity()));
}

TEST(Compare, ABoundThatIsNotANumberAdmitsNothing) {
  EXPECT_FALSE(Compare("x", Of({1.0f}), Of({1.0f}), std::nan("")));
  EXPECT_FALSE(Compare("x", Of({1.0f}), Of({1.0f}), -1.0));
}

// The fault of comparators that test `error > bound` or `x - y > bound`.
TEST(Compare, TwoNegativesAreComparedByMagnitude) {
  EXPECT_FALSE(Compare("x", Of({-5.0f}), Of({-1.0f}), 0.5));
  EXPECT_FALSE(Compare("x", Of({-1.0f}), Of({-5.0f}), 0.5));
}

TEST(Compare, OneUlpOverTheBoundFails) {
  const float x = 3.0f;
  const float next = std::nextafter(x, 4.0f);
  const double ulp = static_cast<double>(next) - x;
  EXPECT_TRUE(Compare("x", Of({next}), Of({x}), ulp));
  EXPECT_FALSE(Compare("x", Of({next}), Of({x}), std::nextafter(ulp, 0.0)));
  EXPECT_FALSE(Compare("x", Of({next}), Of({x}), 0));
  EXPECT_FALSE(Compare("x", Of({std::nextafter(next, 4.0f)}), Of({x}), ulp));
}

TEST(Compare, SubnormalsCount) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_FALSE(Compare("x", Of({tiny}), Of({0.0f}), 0));
  EXPECT_TRUE(Compare("x", Of({tiny}), Of({0.0f}), 0x1p-149));
}

TEST(Compare, SignOfZeroMattersBitwiseOnly) {
  EXPECT_TRUE(Compare("x", Of({-0.0f}), Of({0.0f}), 0));
  EXPECT_FALSE(CompareBitwise("x", Of({-0.0f}), Of({0.0f})));
  EXPECT_TRUE(CompareBitwise("x", Of({-0.0f}), Of({-0.0f})));
}

TEST(Compare, BitwiseSeesPayloadsAndDtypes) {
  const Tensor a = Of({kNan});
  const Tensor b = Of({std::bit_cast<float>(0x7fc00001u)});
  EXPECT_FALSE(CompareBitwise("x", a, b));
  EXPECT_TRUE(CompareBitwise("x", b, b.Clone()));
  EXPECT_THROW(CompareBitwise("x", a, ConvertTo(a, DType::kF64)), Error);
}

TEST(Compare, ShapesMustBeEqual) {
  const Tensor t = Tensor::Zeros({2, 3}, DType::kF32);
  EXPECT_THROW(Compare("x", t, Tensor::Zeros({3, 2}, DType::kF32), 1), Error);
  EXPECT_THROW(Compare("x", t, Tensor::Zeros({6}, DType::kF32), 1), Error);
  EXPECT_THROW(Compare("x", t, Tensor(), 1), Error);
  EXPECT_THROW(CompareBitwise("x", Tensor(), t), Error);
  EXPECT_THROW(CompareToMaximum("x", t, Tensor::Zeros({2, 2}, DType::kF32), 1), Error);
}

TEST(Compare, ReportsTheWorstElementAndTheCount) {
  const Tensor got = Of({0, 0, 0.5f, 0, 9, 1}).Reshape({2, 3});
  const Tensor expected = Tensor::Zeros({2, 3}, DType::kF32);
  const Comparison c = Compare("gemm.y", got, expected, 0.25);
  EXPECT_EQ(c.failed, 3);
  EXPECT_EQ(c.compared, 6);
  EXPECT_EQ(c.worst_index, 4);
  EXPECT_EQ(c.worst_got, 9);
  EXPECT_EQ(c.worst_error, 9);
  EXPECT_THAT(c.message, HasSubstr("gemm.y: 3 of 6 elements differ; worst at [1, 1]"));
}

TEST(Compare, TheWorstIsRelativeToItsOwnBound) {
  const auto bound = [](std::int64_t i) { return i == 0 ? 100.0 : 1e-3; };
  const Comparison c = Compare("x", Of({50, 0.01f}), Of({0, 0}), bound);
  EXPECT_FALSE(c);
  EXPECT_EQ(c.failed, 1);
  EXPECT_EQ(c.worst_index, 1);
}

TEST(Compare, AFailureIsReportedBeforeAnyPass) {
  // The failing element has an error of zero under a bound that admits nothing.
  const auto bound = [](std::int64_t i) { return i == 0 ? 1.0 : -1.0; };
  const Comparison c = Compare("x", Of({0.99f, 7}), Of({0, 7}), bound);
  EXPECT_EQ(c.failed, 1);
  EXPECT_EQ(c.worst_index, 1);
}

TEST(Compare, EmptyTensorsAgree) {
  const Tensor none = Tensor::Empty({0, 4}, DType::kF32);
  EXPECT_TRUE(Compare("x", none, none, 0));
  EXPECT_TRUE(CompareBitwise("x", none, none));
  EXPECT_TRUE(CompareToMaximum("x", none, none, 0));
}

TEST(Compare, LargeIntegersAreComparedExactly) {
  const std::int64_t large = (std::int64_t{1} << 60) + 1;
  const auto of = [](std::int64_t v) {
    return Tensor::FromSpan<std::int64_t>({1}, std::vector{v});
  };
  EXPECT_FALSE(Compare("x", of(large), of(large - 1), 0));
  EXPECT_TRUE(Compare("x", of(large), of(large - 1), 1));
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(Compare("x", of(least), of(most), 0x1p63));
}

TEST(Compare, ToMaximumScalesByTheLargestFiniteValue) {
  EXPECT_TRUE(CompareToMaximum("x", Of({100, 1}), Of({100, 1.9f}), 0.01));
  EXPECT_FALSE(CompareToMaximum("x", Of({100, 1}), Of({100, 2.1f}), 0.01));
  // An infinity or NaN in the golden values must not widen the bound of the others.
  EXPECT_FALSE(CompareToMaximum("x", Of({kInf, 5}), Of({kInf, 1}), 1e-3));
  EXPECT_FALSE(CompareToMaximum("x", Of({kNan, 5}), Of({kNan, 1}), 1e-3));
  // All golden values zero: nothing but zero passes.
  EXPECT_FALSE(CompareToMaximum("x", Of({1e-30f}), Of({0}), 1e-3));
}

TEST(Bounds, UnitRoundoffIsHalfTheSpacingAboveOne) {
  const auto spacing = [](DType dtype, double step) {
    // 1 + u rounds to 1 (tie to even); 1 + u plus a little rounds up by one spacing.
    const double u = UnitRoundoff(dtype);
    const Tensor x = Tensor::FromSpan<double>({2}, std::vector{1 + u, 1 + u * 1.5});
    const Tensor y = ConvertTo(x, dtype);
    EXPECT_EQ(ElementAsDouble(y, 0), 1.0) << Name(dtype);
    EXPECT_EQ(ElementAsDouble(y, 1), 1.0 + step) << Name(dtype);
  };
  spacing(DType::kF32, 0x1p-23);
  spacing(DType::kBF16, 0x1p-7);
  spacing(DType::kF16, 0x1p-10);
  spacing(DType::kE4M3, 0x1p-3);
  spacing(DType::kE5M2, 0x1p-2);
  EXPECT_EQ(UnitRoundoff(DType::kF64), 0x1p-53);
  EXPECT_THROW(UnitRoundoff(DType::kI64), Error);
}

TEST(Bounds, GammaGrowsAndRefusesWhatHasNoBound) {
  EXPECT_EQ(Gamma(0, DType::kF32), 0.0);
  EXPECT_GT(Gamma(100, DType::kF32), 100 * 0x1p-24);
  EXPECT_LT(Gamma(100, DType::kF32), 100 * 0x1p-24 * 1.0001);
  EXPECT_THROW(Gamma(256, DType::kBF16), Error);
}

// A worst case by construction: 1 + u + u + … in fp32 never leaves 1.
TEST(Bounds, DotBoundHoldsForAWorstCaseAndIsNotLoose) {
  constexpr int kTerms = 4097;
  float sum = 1.0f;
  double exact = 1.0;
  for (int i = 1; i < kTerms; ++i) {
    sum += 0x1p-24f;
    exact += 0x1p-24;
  }
  const double bound = DotBound(kTerms, exact, DType::kF32, DType::kF32);
  EXPECT_LE(std::abs(sum - exact), bound);
  EXPECT_GE(std::abs(sum - exact), 0.9 * bound);
}

TEST(Bounds, DotBoundAddsTheOutputRounding) {
  const double narrow = DotBound(8, 1.0, DType::kF32, DType::kBF16);
  EXPECT_GT(narrow, 0x1p-8);
  EXPECT_LT(narrow, 0x1p-8 * 1.01);
  // Nothing but zero is left of a sum of zeros, up to the smallest subnormal.
  EXPECT_LT(DotBound(8, 0.0, DType::kF32, DType::kBF16), 0x1p-133);
}

}  // namespace
}  // namespace cistron::check
