// The tools of the tests, each shown to fail where it must.
#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "cistron/ops/context.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/guarded_allocator.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(GuardedAllocator, CleanUse) {
  GuardedAllocator allocator;
  {
    const Tensor t = Tensor::Zeros({7, 3}, DType::kF32, allocator);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.raw()) % Allocator::kAlignment, 0u);
    EXPECT_EQ(allocator.Stats().live_bytes, 84);
  }
  EXPECT_EQ(allocator.Stats().live_bytes, 0);
  EXPECT_EQ(allocator.Stats().peak_bytes, 84);
  EXPECT_THAT(allocator.TakeViolations(), IsEmpty());
}

TEST(GuardedAllocator, FreshMemoryIsNan) {
  GuardedAllocator allocator;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3,
                            DType::kE5M2, DType::kE8M0}) {
    const Tensor t = Tensor::Empty({5}, dtype, allocator);
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_TRUE(std::isnan(ElementAsDouble(t, i)));
  }
}

TEST(GuardedAllocator, ReadsBeyondABlockAreNan) {
  GuardedAllocator allocator;
  const Tensor t = Tensor::Zeros({4}, DType::kF32, allocator);
  const float* p = t.data<float>();
  EXPECT_TRUE(std::isnan(p[-1]));
  EXPECT_TRUE(std::isnan(p[4]));
  const auto* narrow = reinterpret_cast<const bf16*>(p);
  EXPECT_TRUE(std::isnan(float{narrow[8]}));
  double wide = 0;
  std::memcpy(&wide, p + 4, sizeof(wide));
  EXPECT_TRUE(std::isnan(wide));
}

TEST(GuardedAllocator, CatchesAnOverrun) {
  GuardedAllocator allocator;
  const Tensor t = Tensor::Zeros({4}, DType::kF32, allocator);
  t.data<float>()[4] = 0.0f;
  EXPECT_THAT(allocator.TakeViolations(),
              ElementsAre(HasSubstr("byte 0 beyond a block of 16 bytes")));
  EXPECT_THAT(allocator.TakeViolations(), IsEmpty());  // reported once
}

TEST(GuardedAllocator, CatchesANanBeyondTheEnd) {
  GuardedAllocator allocator;
  const Tensor t = Tensor::Zeros({4}, DType::kF32, allocator);
  t.data<float>()[4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(allocator.TakeViolations().size(), 1u);
}

TEST(GuardedAllocator, CatchesAnUnderrun) {
  GuardedAllocator allocator;
  const Tensor t = Tensor::Zeros({4}, DType::kF32, allocator);
  t.data<float>()[-2] = 1.0f;
  EXPECT_THAT(allocator.TakeViolations(), ElementsAre(HasSubstr("bytes before a block")));
}

TEST(GuardedAllocator, CatchesAWriteAfterReturn) {
  GuardedAllocator allocator;
  Tensor t = Tensor::Zeros({4}, DType::kF32, allocator);
  float* stale = t.data<float>();
  t = Tensor();
  stale[1] = 1.0f;
  EXPECT_THAT(allocator.TakeViolations(), ElementsAre(HasSubstr("after its return")));
}

TEST(GuardedAllocator, CatchesAWrongReturn) {
  GuardedAllocator allocator;
  void* block = allocator.Allocate(16);
  allocator.Deallocate(block, 24);
  allocator.Deallocate(block, 16);
  EXPECT_THAT(allocator.TakeViolations(),
              ElementsAre(HasSubstr("returned as one of 24"), HasSubstr("not in use")));
}

TEST(GuardedAllocator, DestructorFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(
      {
        GuardedAllocator allocator;
        const Tensor t = Tensor::Zeros({1}, DType::kU8, allocator);
        t.data<std::uint8_t>()[1] = 7;
      },
      "beyond");
}

TEST(GuardedAllocator, ServesAContext) {
  GuardedAllocator allocator;
  const ops::Context ctx = ops::Context().WithAllocator(allocator);
  const Tensor t = ctx.Empty({3}, DType::kF32);
  EXPECT_EQ(allocator.Stats().live_bytes, 12);
  EXPECT_TRUE(std::isnan(ElementAsDouble(t, 0)));
}

TEST(Poison, PaddedTailIsPoisonedAndWatched) {
  const PaddedTensor padded = Pad(Normal({3, 4}, DType::kBF16, "padded"), 2);
  EXPECT_TRUE(IsFinite(padded.used));
  EXPECT_TRUE(IsPoisoned(padded.tail));
  EXPECT_FALSE(IsFinite(padded.whole));
  padded.tail.data<bf16>()[3] = bf16(0.0f);
  EXPECT_FALSE(IsPoisoned(padded.tail));
}

TEST(Poison, IntegersTakeTheirLargestValue) {
  const PaddedTensor padded = MakePadded({2}, DType::kI64, 1);
  EXPECT_EQ(padded.tail.data<std::int64_t>()[0], std::numeric_limits<std::int64_t>::max());
  EXPECT_TRUE(IsPoisoned(padded.whole));
}

TEST(Random, ValuesDependOnNameAndIndexAlone) {
  const Tensor a = Normal({4, 8}, DType::kF64, "a");
  EXPECT_TRUE(
      Agrees(check::CompareBitwise("again", a, Normal({32}, DType::kF64, "a").Reshape({4, 8}))));
  EXPECT_FALSE(check::CompareBitwise("other name", a, Normal({4, 8}, DType::kF64, "b")));
}

TEST(Random, SplitsAreUnevenAndComplete) {
  const Tensor split = RandomSplit(8, 500, "split");
  std::int64_t sum = 0;
  std::int64_t empty = 0;
  for (const std::int64_t n : split.span<std::int64_t>()) {
    sum += n;
    empty += n == 0;
  }
  EXPECT_EQ(sum, 500);
  EXPECT_GE(empty, 1);
  EXPECT_LE(empty, 4);
}

// f(x) = Σ w·sin(x)·exp(x/2): smooth, all derivatives of order one.
class GradientCheck : public ::testing::Test {
 protected:
  double F() const {
    double sum = 0;
    for (std::int64_t i = 0; i < x_.numel(); ++i) {
      const double v = ElementAsDouble(x_, i);
      sum += ElementAsDouble(w_, i) * std::sin(v) * std::exp(v / 2);
    }
    return sum;
  }
  Tensor Gradient() const {
    Tensor g = Tensor::Empty(x_.shape(), DType::kF64);
    for (std::int64_t i = 0; i < x_.numel(); ++i) {
      const double v = ElementAsDouble(x_, i);
      g.data<double>()[i] =
          ElementAsDouble(w_, i) * std::exp(v / 2) * (std::cos(v) + std::sin(v) / 2);
    }
    return g;
  }
  const Tensor x_ = Normal({6, 5}, DType::kF64, "x");
  const Tensor w_ = Normal({6, 5}, DType::kF64, "w");
  const ScalarFunction f_ = [this] { return F(); };
};

TEST_F(GradientCheck, AcceptsTheGradientAndRestoresX) {
  const Tensor before = x_.Clone();
  EXPECT_TRUE(Agrees(CheckGradient("f.dx", f_, x_, Gradient())));
  EXPECT_TRUE(Agrees(CheckGradientAlong("f.dx", f_, std::vector{x_}, std::vector{Gradient()})));
  EXPECT_TRUE(Agrees(check::CompareBitwise("x", x_, before)));
}

TEST_F(GradientCheck, RefusesOneElementOffByAMillionth) {
  const Tensor wrong = Gradient();
  wrong.data<double>()[17] += 1e-6;
  const check::Comparison c = CheckGradient("f.dx", f_, x_, wrong);
  EXPECT_FALSE(c);
  EXPECT_EQ(c.failed, 1);
  EXPECT_THAT(c.message, HasSubstr("element 17 of f64 [6, 5]"));
  EXPECT_FALSE(CheckGradientAlong("f.dx", f_, std::vector{x_}, std::vector{wrong}));
}

TEST_F(GradientCheck, RefusesNanAndMissingTerms) {
  const Tensor wrong = Gradient();
  wrong.data<double>()[0] = NAN;
  EXPECT_FALSE(CheckGradient("f.dx", f_, x_, wrong));
  EXPECT_FALSE(CheckGradient("f.dx", f_, x_, Tensor::Zeros({6, 5}, DType::kF64)));
}

TEST_F(GradientCheck, DrawsElementsOfALargeTensor) {
  GradientCheckOptions options;
  options.max_elements = 7;
  const check::Comparison c = CheckGradient("f.dx", f_, x_, Gradient(), options);
  EXPECT_TRUE(Agrees(c));
  EXPECT_EQ(c.compared, 7);
}

TEST_F(GradientCheck, WantsF64OfOneShape) {
  EXPECT_THROW(CheckGradient("f.dx", f_, x_, Tensor::Zeros({30}, DType::kF64)), Error);
  EXPECT_THROW(CheckGradient("f.dx", f_, x_, Tensor::Zeros({6, 5}, DType::kF32)), Error);
}

}  // namespace
}  // namespace cistron::testing
