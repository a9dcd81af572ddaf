#include "cistron/tensor/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cistron/tensor/grouped_tensor.h"

namespace cistron {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kMostI64 = std::numeric_limits<std::int64_t>::max();

// Message of the cistron::Error that f throws.
template <class F>
std::string ErrorOf(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    return e.message();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

Tensor Counting(const Shape& shape) {
  Tensor t = Tensor::Empty(shape, DType::kF32);
  std::iota(t.span<float>().begin(), t.span<float>().end(), 0.0f);
  return t;
}

TEST(Shape, CountsElements) {
  EXPECT_EQ((Shape{}).numel(), 1);
  EXPECT_EQ((Shape{4, 0, 3}).numel(), 0);
  EXPECT_EQ((Shape{2, 3, 4}).numel(), 24);
  EXPECT_EQ((Shape{kMostI64}).numel(), kMostI64);
  EXPECT_EQ(ToString(Shape{8, 128}), "[8, 128]");
  EXPECT_EQ(ToString(Shape{}), "[]");
}

TEST(Shape, EqualityIncludesTheRank) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{2, 3, 1}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{3, 2}));
}

TEST(Shape, RefusesWhatCannotBe) {
  EXPECT_THAT(ErrorOf([] { Shape{2, -1}; }), HasSubstr("dimension -1 is negative"));
  EXPECT_THAT(ErrorOf([] { Shape{1, 1, 1, 1, 1, 1, 1}; }), HasSubstr("7 dimensions"));
  EXPECT_THAT(ErrorOf([] {
                Shape{std::int64_t{1} << 32, std::int64_t{1} << 31};
              }),
              HasSubstr("2^63"));
  // A zero does not hide an overflow of the others, nor a negative dimension.
  EXPECT_THAT(ErrorOf([] {
                Shape{std::int64_t{1} << 40, 0, std::int64_t{1} << 40};
              }),
              HasSubstr("2^63"));
  EXPECT_THAT(ErrorOf([] { Shape{0, -5}; }), HasSubstr("negative"));
}

TEST(Tensor, BytesMayNotOverflow) {
  EXPECT_THAT(ErrorOf([] { Tensor::Empty({std::int64_t{1} << 61}, DType::kF64); }),
              HasSubstr("2^63 - 1 bytes"));
}

TEST(Tensor, UndefinedAndEmptyDiffer) {
  EXPECT_FALSE(Tensor());
  const Tensor empty = Tensor::Empty({0, 5}, DType::kF32);
  EXPECT_TRUE(empty);
  EXPECT_TRUE(empty.IsContiguous());
  EXPECT_EQ(empty.span<float>().size(), 0u);
  EXPECT_EQ(Describe(Tensor()), "an undefined tensor");
  EXPECT_EQ(Describe(empty), "f32 [0, 5]");
}

TEST(Tensor, DataIsTyped) {
  const Tensor t = Counting({2, 2});
  EXPECT_THAT(ErrorOf([&] { t.data<double>(); }), HasSubstr("data<f64>() of a f32 [2, 2] tensor"));
}

TEST(Tensor, ItemNeedsOneElement) {
  EXPECT_EQ(Tensor::Scalar(2.5).item(), 2.5);
  EXPECT_EQ(Counting({1, 1}).item(), 0.0);
  EXPECT_THAT(ErrorOf([] { return Counting({2}).item(); }), HasSubstr("exactly one element"));
}

TEST(Tensor, SliceSharesStorage) {
  const Tensor t = Tensor::Zeros({4, 8}, DType::kF32);
  const Tensor s = t.Slice(1, 2, 3);
  EXPECT_FALSE(s.IsContiguous());
  s.data<float>()[s.stride(0)] = 1.0f;
  EXPECT_EQ(ElementAsDouble(t, 10), 1.0);
}

TEST(Tensor, SliceOfRowsIsContiguous) {
  const Tensor t = Counting({4, 3});
  const Tensor s = t.Slice(0, 1, 2);
  EXPECT_TRUE(s.IsContiguous());
  EXPECT_EQ(ElementAsDouble(s, 0), 3.0);
  EXPECT_EQ(ElementAsDouble(s.Slice(-1, 2, 1).Slice(0, 1, 1), 0), 8.0);  // negative dimensions
  EXPECT_EQ(t.Slice(0, 4, 0).numel(), 0);
}

TEST(Tensor, SliceRefusesWhatIsOutside) {
  const Tensor t = Counting({4, 3});
  EXPECT_THAT(ErrorOf([&] { t.Slice(0, 3, 2); }), HasSubstr("[3, 3 + 2) is outside dimension 0"));
  EXPECT_THAT(ErrorOf([&] { t.Slice(0, -1, 2); }), HasSubstr("outside"));
  EXPECT_THAT(ErrorOf([&] { t.Slice(0, 1, kMostI64); }), HasSubstr("outside"));
  EXPECT_THAT(ErrorOf([&] { t.Slice(2, 0, 1); }), HasSubstr("dimension 2"));
}

TEST(Tensor, SelectDropsTheFirstDimension) {
  const Tensor t = Counting({2, 3, 4});
  const Tensor s = t.Select(1);
  EXPECT_EQ(s.shape(), (Shape{3, 4}));
  EXPECT_EQ(ElementAsDouble(s, 5), 17.0);
  EXPECT_EQ(s.Select(2).Select(3).item(), 23.0);
  EXPECT_THAT(ErrorOf([&] { t.Select(2); }), HasSubstr("outside"));
  EXPECT_THAT(ErrorOf([&] { Tensor::Scalar(1).Select(0); }), HasSubstr("scalar"));
  // A column slice keeps its row stride through Select.
  const Tensor column = t.Slice(2, 1, 2).Select(1);
  EXPECT_EQ(column.data<float>()[column.stride(0)], 17.0f);
}

TEST(Tensor, StridesOfALargeBorrowedTensorDoNotOverflow) {
  float value = 0;
  const std::int64_t n = std::int64_t{1} << 10;
  const Tensor t = Tensor::Borrow(&value, {2, n, n, n, n, n}, DType::kF32);
  EXPECT_EQ(t.Select(0).stride(0), n * n * n * n);
  EXPECT_TRUE(t.Select(0).IsContiguous());
}

TEST(Tensor, ReshapeNeedsTheSameElementsInOrder) {
  const Tensor t = Counting({2, 6});
  EXPECT_EQ(ElementAsDouble(t.Reshape({3, 4}), 11), 11.0);
  EXPECT_EQ(t.Reshape({3, 4}).stride(0), 4);
  EXPECT_THAT(ErrorOf([&] { t.Reshape({5}); }), HasSubstr("does not have the elements"));
  EXPECT_THAT(ErrorOf([&] { t.Slice(1, 0, 3).Reshape({6}); }), HasSubstr("not contiguous"));
}

TEST(Tensor, AViewKeepsTheStorageAlive) {
  const auto allocator = MakeCachingCpuAllocator();
  Tensor view;
  {
    const Tensor t = Tensor::Zeros({100, 10}, DType::kF32, *allocator);
    view = t.Select(7);
  }
  EXPECT_GT(allocator->Stats().live_bytes, 0);
  EXPECT_EQ(ElementAsDouble(view, 9), 0.0);
  view = Tensor();
  EXPECT_EQ(allocator->Stats().live_bytes, 0);
}

TEST(Tensor, CloneCopies) {
  const Tensor t = Counting({3});
  const Tensor copy = t.Clone();
  copy.data<float>()[0] = 9;
  EXPECT_EQ(ElementAsDouble(t, 0), 0.0);
  EXPECT_THROW(Counting({3, 3}).Slice(1, 0, 1).Clone(), Error);
}

TEST(Tensor, FromSpanWantsAllValues) {
  const std::vector<float> values{1, 2, 3};
  EXPECT_EQ(ElementAsDouble(Tensor::FromSpan<float>({3}, values), 2), 3.0);
  EXPECT_THAT(ErrorOf([&] {
                Tensor::FromSpan<float>({2, 2}, values);
              }),
              HasSubstr("3 values do not fill shape [2, 2]"));
}

TEST(Tensor, PoisonIsNanInEveryFloat) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3,
                            DType::kE5M2, DType::kE8M0}) {
    const Tensor t = Tensor::Zeros({3}, dtype);
    FillPoison(t);
    for (std::int64_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(ElementAsDouble(t, i)));
  }
  const Tensor counts = Tensor::Zeros({2}, DType::kI32);
  FillPoison(counts);
  EXPECT_EQ(counts.data<std::int32_t>()[1], std::numeric_limits<std::int32_t>::max());
}

TEST(Convert, RoundsF64OnceToNarrowTypes) {
  // 1 + 2^-8 is the midpoint between two bf16 values; a little more must round up. Through fp32 the
  // excess of 2^-40 is lost and the tie goes to even, downwards.
  const Tensor x = Tensor::FromSpan<double>(
      {3}, std::vector{1 + 0x1p-8, 1 + 0x1p-8 + 0x1p-40, -(1 + 0x1p-8 + 0x1p-40)});
  const Tensor y = ConvertTo(x, DType::kBF16);
  EXPECT_EQ(ElementAsDouble(y, 0), 1.0);
  EXPECT_EQ(ElementAsDouble(y, 1), 1 + 0x1p-7);
  EXPECT_EQ(ElementAsDouble(y, 2), -(1 + 0x1p-7));
}

TEST(Convert, EdgesOfF64) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor x = Tensor::FromSpan<double>(
      {7}, std::vector{inf, -inf, std::nan(""), 1e300, -0.0, 1e-300, -1e-300});
  const Tensor b = ConvertTo(x, DType::kBF16);
  EXPECT_EQ(ElementAsDouble(b, 0), inf);
  EXPECT_EQ(ElementAsDouble(b, 1), -inf);
  EXPECT_TRUE(std::isnan(ElementAsDouble(b, 2)));
  EXPECT_EQ(ElementAsDouble(b, 3), inf);  // beyond bf16's largest value by more than half a step
  EXPECT_TRUE(std::signbit(ElementAsDouble(b, 4)));
  EXPECT_EQ(ElementAsDouble(b, 5), 0.0);
  EXPECT_TRUE(std::signbit(ElementAsDouble(b, 6)));
  const Tensor e = ConvertTo(x, DType::kE4M3);
  EXPECT_EQ(ElementAsDouble(e, 0), 448.0);
  EXPECT_EQ(ElementAsDouble(e, 1), -448.0);
  EXPECT_EQ(ElementAsDouble(e, 3), 448.0);
}

TEST(Convert, IntegersAreExactOrAnError) {
  const Tensor x = Tensor::FromSpan<std::int64_t>({2}, std::vector<std::int64_t>{255, -1});
  EXPECT_EQ(ElementAsDouble(ConvertTo(x, DType::kI32), 1), -1.0);
  EXPECT_THAT(ErrorOf([&] { ConvertTo(x, DType::kU8); }), HasSubstr("-1 does not fit u8"));
  const Tensor nan = Tensor::FromSpan<float>({1}, std::vector{std::nanf("")});
  EXPECT_THAT(ErrorOf([&] { ConvertTo(nan, DType::kI64); }), HasSubstr("does not fit i64"));
  const Tensor large = Tensor::FromSpan<float>({1}, std::vector{0x1p63f});
  EXPECT_THAT(ErrorOf([&] { ConvertTo(large, DType::kI64); }), HasSubstr("does not fit i64"));
}

TEST(Convert, ScalesNeedARule) {
  EXPECT_THAT(ErrorOf([] { ConvertTo(Counting({2}), DType::kE8M0); }), HasSubstr("rounding rule"));
  EXPECT_THROW(Convert(Counting({2}), Counting({3})), Error);
}

TEST(GroupedTensor, RowsAreABound) {
  const GroupedTensor g{Counting({10, 2}),
                        Tensor::FromSpan<std::int64_t>({3}, std::vector<std::int64_t>{4, 0, 3})};
  EXPECT_EQ(g.num_groups(), 3);
  EXPECT_EQ(g.max_rows(), 10);
}

TEST(Device, Names) {
  EXPECT_EQ(ToString(Device{}), "cpu");
  EXPECT_EQ(ToString(Device{DeviceType::kCuda, 1}), "cuda:1");
}

}  // namespace
}  // namespace cistron
