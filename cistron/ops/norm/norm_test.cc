// RMSNorm: every implementation and instruction set against the fp64 reference under derived
// bounds, the reference's gradient against differences, and the promises of norm.h.
#include "cistron/ops/norm/norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/norm/norm_cases.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/guarded_allocator.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/instruction_set.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;
using testing::Normal;

constexpr double kEps = 1e-5;

struct Variant {
  std::string impl;
  std::int64_t target;
  std::string name;

  Context context() const {
    return (impl == "cuda" ? testing::CudaContext() : Context()).WithImpl(impl);
  }
};
std::vector<Variant> Variants() {
  std::vector<Variant> variants = {{"ref", testing::InstructionSets().front(), "ref"}};
  for (const std::int64_t target : testing::InstructionSets()) {
    variants.push_back({"cpu", target, "cpu/" + testing::InstructionSetName(target)});
  }
  if (testing::HasCuda()) {
    variants.push_back({"cuda", testing::InstructionSets().front(), "cuda"});
  }
  return variants;
}

template <class F>
void ForAll(F&& f) {
  for (const RmsNormCase& c : RmsNormCases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Variant& variant : Variants()) {
        if (c.gpu_alone && variant.impl != "cuda") continue;
        SCOPED_TRACE(fmt::format("[{}, {}] {} {}", c.rows, c.width, Name(dtype), variant.name));
        const testing::ScopedInstructionSet scope(variant.target);
        f(c, dtype, variant.context());
      }
    }
  }
}

double At(const Tensor& t, std::int64_t i) {
  return ElementAsDouble(t, i);
}

// Unit of what the output's own rounding adds to a result computed in f32.
double OutputUnit(DType dtype) {
  return check::UnitRoundoff(DType::kF32) + (dtype == DType::kF32 ? 0 : check::UnitRoundoff(dtype));
}

TEST(RmsNorm, ForwardAgreesWithFp64) {
  ForAll([](const RmsNormCase& c, DType dtype, const Context& ctx) {
    const Shape shape{c.rows, c.width};
    const Tensor x = Normal(shape, dtype, "x"), residual = Normal(shape, dtype, "residual");
    const Tensor g = Normal({c.width}, dtype, "g");
    for (const bool with_residual : {false, true}) {
      const testing::PaddedTensor h = testing::MakePadded(shape, dtype, 2);
      const testing::PaddedTensor y = testing::MakePadded(shape, dtype, 2);
      const testing::PaddedTensor rstd = testing::MakePadded({c.rows}, DType::kF32, 5);
      RmsNormForward(ctx, x, with_residual ? residual : Tensor(), g, kEps, h.used, rstd.used,
                     Write(y.used));
      const double unit = OutputUnit(dtype);
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        const double sum = At(x, i) + (with_residual ? At(residual, i) : 0);
        ASSERT_LE(std::abs(At(h.used, i) - sum), with_residual ? unit * std::abs(sum) * 1.01 : 0);
      }
      // Truth: the same formula in fp64 of h as it was rounded.
      const Tensor truth = Tensor::Empty(shape, DType::kF64);
      const Tensor truth_rstd = Tensor::Empty({c.rows}, DType::kF64);
      RmsNormForward(Context().WithImpl("ref"), ConvertTo(h.used, DType::kF64), {},
                     ConvertTo(g, DType::kF64), kEps, {}, truth_rstd, Write(truth));
      // Half of the error of the mean of squares, then eps, root, inverse, two products.
      const double error = check::Gamma(c.width + 8, DType::kF32);
      EXPECT_TRUE(Agrees(check::Compare("y", y.used, truth, [&](std::int64_t i) {
        return (error + unit * (1 + error)) * std::abs(At(truth, i));
      })));
      EXPECT_TRUE(Agrees(check::Compare("rstd", rstd.used, truth_rstd, [&](std::int64_t i) {
        return error * At(truth_rstd, i);
      })));
      for (const Tensor& tail : {h.tail, y.tail, rstd.tail}) {
        EXPECT_TRUE(testing::IsPoisoned(tail));
      }

      const Tensor before = Normal(shape, dtype, "before"), after = before.Clone();
      RmsNormForward(ctx, h.used, {}, g, kEps, {}, {}, Accumulate(after));
      EXPECT_TRUE(Agrees(check::Compare(
          "y - before", after,
          [&] {
            const Tensor sum = truth.Clone();
            for (std::int64_t i = 0; i < sum.numel(); ++i) sum.data<double>()[i] += At(before, i);
            return sum;
          }(),
          [&](std::int64_t i) {
            return error * std::abs(At(truth, i)) +
                   unit * (1 + error) * (std::abs(At(truth, i)) + std::abs(At(before, i)));
          })));
    }
  });
}

// Bounds of dh by element and of dg by column, from the absolute values of what is summed.
struct BackwardBounds {
  std::vector<double> dh, dg;
};
BackwardBounds BoundsOf(const RmsNormCase& c, const Tensor& dy, const Tensor& h, const Tensor& rstd,
                        const Tensor& g) {
  BackwardBounds b;
  b.dg.assign(static_cast<std::size_t>(c.width), 0);
  for (std::int64_t t = 0; t < c.rows; ++t) {
    const double r = At(rstd, t);
    double dot = 0;
    for (std::int64_t j = 0; j < c.width; ++j) {
      dot += std::abs(At(g, j) * At(dy, t * c.width + j) * At(h, t * c.width + j));
    }
    for (std::int64_t j = 0; j < c.width; ++j) {
      const std::int64_t i = t * c.width + j;
      b.dh.push_back(check::Gamma(c.width + 8, DType::kF32) * r *
                     (std::abs(At(g, j) * At(dy, i)) +
                      std::abs(At(h, i)) * r * r * dot / static_cast<double>(c.width)));
      b.dg[static_cast<std::size_t>(j)] +=
          check::Gamma(c.rows + 3, DType::kF32) * std::abs(At(dy, i) * At(h, i) * r);
    }
  }
  return b;
}

TEST(RmsNorm, BackwardAgreesWithFp64) {
  ForAll([](const RmsNormCase& c, DType dtype, const Context& ctx) {
    const Shape shape{c.rows, c.width};
    const Tensor h = Normal(shape, dtype, "h"), dy = Normal(shape, dtype, "dy");
    const Tensor g = Normal({c.width}, dtype, "g"), dh_in = Normal(shape, dtype, "dh_in");
    const Tensor rstd = Tensor::Empty({c.rows}, DType::kF32);
    testing::FillUniform(rstd, "rstd", 0.3, 1.5);
    const auto f64 = [](const Tensor& t) { return ConvertTo(t, DType::kF64); };
    const BackwardBounds bounds = BoundsOf(c, dy, h, rstd, g);
    const double unit = OutputUnit(dtype);
    for (const bool with_dh_in : {false, true}) {
      const Tensor truth = Tensor::Empty(shape, DType::kF64);
      const Tensor truth_dg = Tensor::Empty({c.width}, DType::kF64);
      RmsNormBackward(Context().WithImpl("ref"), f64(dy), f64(h), f64(rstd), f64(g),
                      with_dh_in ? f64(dh_in) : Tensor(), Write(truth), Write(truth_dg));
      const testing::PaddedTensor dh = testing::MakePadded(shape, dtype, 2);
      const testing::PaddedTensor dg = testing::MakePadded({c.width}, DType::kF32, 3);
      RmsNormBackward(ctx, dy, h, rstd, g, with_dh_in ? dh_in : Tensor(), Write(dh.used),
                      Write(dg.used));
      const auto dh_bound = [&](std::int64_t i) {
        const double own = bounds.dh[static_cast<std::size_t>(i)];
        // Adding dh_in rounds once more.
        return own + 2 * unit * (std::abs(At(truth, i)) + own);
      };
      EXPECT_TRUE(Agrees(check::Compare("dh", dh.used, truth, dh_bound)));
      const auto dg_bound = [&](std::int64_t j) { return bounds.dg[static_cast<std::size_t>(j)]; };
      EXPECT_TRUE(Agrees(check::Compare("dg", dg.used, truth_dg, dg_bound)));
      EXPECT_TRUE(testing::IsPoisoned(dh.tail));
      EXPECT_TRUE(testing::IsPoisoned(dg.tail));

      const Tensor before = Normal(shape, dtype, "before"), after = before.Clone();
      const Tensor dg_before = Normal({c.width}, DType::kF32, "dg"), dg_after = dg_before.Clone();
      RmsNormBackward(ctx, dy, h, rstd, g, with_dh_in ? dh_in : Tensor(), Accumulate(after),
                      Accumulate(dg_after));
      for (std::int64_t i = 0; i < truth.numel(); ++i) truth.data<double>()[i] += At(before, i);
      for (std::int64_t j = 0; j < c.width; ++j) truth_dg.data<double>()[j] += At(dg_before, j);
      EXPECT_TRUE(Agrees(check::Compare("dh accumulated", after, truth, [&](std::int64_t i) {
        return bounds.dh[static_cast<std::size_t>(i)] +
               3 * unit * (std::abs(At(truth, i)) + 2 * std::abs(At(before, i)) + 1e-6);
      })));
      EXPECT_TRUE(Agrees(check::Compare("dg accumulated", dg_after, truth_dg, [&](std::int64_t j) {
        return dg_bound(j) * 1.01 + check::UnitRoundoff(DType::kF32) * std::abs(At(truth_dg, j));
      })));
    }
  });
}

// The residual stream in place: h over x, dh over dh_in, dh over dy. And rows with a stride, which
// at a width of 64 are whole packs of a GPU.
void CheckInPlaceAndStrided(std::int64_t width, std::int64_t before) {
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(fmt::format("width {} {}", width, variant.name));
    const testing::ScopedInstructionSet scope(variant.target);
    const Context ctx = variant.context();
    const Shape shape{40, width};
    const Tensor x = Normal(shape, DType::kF32, "x"), residual = Normal(shape, DType::kF32, "r");
    const Tensor g = Normal({width}, DType::kF32, "g"), dy = Normal(shape, DType::kF32, "dy");
    const Tensor h = ctx.Empty(shape, DType::kF32), y = ctx.Empty(shape, DType::kF32);
    const Tensor rstd = ctx.Empty({40}, DType::kF32), dg = ctx.Empty({width}, DType::kF32);
    const Tensor dh = ctx.Empty(shape, DType::kF32);
    RmsNormForward(ctx, x, residual, g, kEps, h, rstd, Write(y));
    RmsNormBackward(ctx, dy, h, rstd, g, residual, Write(dh), Write(dg));

    const Tensor same_h = x.Clone(), same_y = ctx.Empty(shape, DType::kF32);
    RmsNormForward(ctx, same_h, residual, g, kEps, same_h, rstd, Write(same_y));
    EXPECT_TRUE(Agrees(check::CompareBitwise("h over x", same_h, h)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("y", same_y, y)));
    for (const bool over_dy : {false, true}) {
      const Tensor a = dy.Clone(), b = residual.Clone(), sum = ctx.Empty({width}, DType::kF32);
      RmsNormBackward(ctx, a, h, rstd, g, b, Write(over_dy ? a : b), Write(sum));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dh in place", over_dy ? a : b, dh)));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dg", sum, dg)));
    }

    const std::int64_t stride = before + width + 8;
    const Tensor wide = ctx.Empty({40, stride}, DType::kF32);
    FillPoison(wide);
    const Tensor view = wide.Slice(1, before, width);
    RmsNormForward(ctx, x, residual, g, kEps, view, rstd, Write(wide.Slice(1, before, width)));
    for (std::int64_t i = 0; i < 40 * stride; ++i) {
      const std::int64_t column = i % stride - before;
      if (column < 0 || column >= width) {
        ASSERT_TRUE(std::isnan(At(wide, i)));
      } else {
        ASSERT_EQ(At(wide, i), At(y, i / stride * width + column));
      }
    }
  }
}
TEST(RmsNorm, InPlaceAndStrided) {
  CheckInPlaceAndStrided(37, 5);
  CheckInPlaceAndStrided(64, 4);
  CheckInPlaceAndStrided(1024, 4);
}

// h is rounded to bf16 as the type's own constructor does it, NaN, Inf and subnormals included: all
// 65,536 values of x with residuals that make the sum round.
TEST(RmsNorm, ResidualRoundsLikeTheReference) {
  const Shape shape{256, 256};
  const Tensor x = Tensor::Empty(shape, DType::kBF16),
               residual = Tensor::Empty(shape, DType::kBF16);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    x.data<bf16>()[i] = bf16::FromBits(static_cast<std::uint16_t>(i));
    // A neighbour in magnitude, eight to nine binades below: half units and what is around them.
    residual.data<bf16>()[i] =
        bf16(static_cast<float>(x.data<bf16>()[i ^ 5]) * (i % 3 == 0 ? 0x1p-8f : -0x1p-9f));
    if (!std::isfinite(static_cast<float>(residual.data<bf16>()[i])))
      residual.data<bf16>()[i] = bf16(1.0f);
  }
  const Tensor g = Normal({256}, DType::kBF16, "g"), y = Tensor::Empty(shape, DType::kBF16);
  Tensor expected;
  for (const Variant& variant : Variants()) {
    SCOPED_TRACE(variant.name);
    const testing::ScopedInstructionSet scope(variant.target);
    const Tensor h = Tensor::Empty(shape, DType::kBF16);
    RmsNormForward(variant.context(), x, residual, g, kEps, h, {}, Write(y));
    if (!expected) expected = h;
    if (variant.impl == "cuda") {  // whose NaN has one payload
      EXPECT_TRUE(Agrees(check::Compare("h", h, expected, [](std::int64_t) { return 0.0; })));
    } else {
      EXPECT_TRUE(Agrees(check::CompareBitwise("h", h, expected)));
    }
  }
}

// Trap atomics: dg sums fixed blocks of rows in order, whatever the number of threads.
TEST(RmsNorm, Atomics) {
  const Shape shape{9001, 20};
  const Tensor h = Normal(shape, DType::kF32, "h"), dy = Normal(shape, DType::kF32, "dy");
  const Tensor g = Normal({20}, DType::kF32, "g"), rstd = Normal({9001}, DType::kF32, "r");
  Tensor first_dg, first_dh;
  for (const int threads : {1, 2, 3, 7, 1}) {
    const testing::ThreadsForScope scope(threads);
    const Tensor dh = Tensor::Empty(shape, DType::kF32), dg = Tensor::Empty({20}, DType::kF32);
    RmsNormBackward(Context(), dy, h, rstd, g, {}, Write(dh), Write(dg));
    if (!first_dg) first_dg = dg, first_dh = dh;
    EXPECT_TRUE(Agrees(check::CompareBitwise("dg", dg, first_dg)));
    EXPECT_TRUE(Agrees(check::CompareBitwise("dh", dh, first_dh)));
  }
}

// The same on a GPU: every run gives the same bits.
TEST(RmsNorm, AtomicsOnCuda) {
  if (!testing::HasCuda()) GTEST_SKIP() << "there is no GPU here";
  const Context ctx = testing::CudaContext();
  for (const std::int64_t width : {20, 256, 1024}) {
    const Shape shape{2001, width};
    const Tensor h = Normal(shape, DType::kBF16, "h"), dy = Normal(shape, DType::kBF16, "dy");
    const Tensor g = Normal({width}, DType::kBF16, "g"), rstd = Normal({2001}, DType::kF32, "r");
    Tensor first_dg, first_dh;
    for (int run = 0; run < 20; ++run) {
      const Tensor dh = ctx.Empty(shape, DType::kBF16), dg = ctx.Empty({width}, DType::kF32);
      RmsNormBackward(ctx, dy, h, rstd, g, {}, Write(dh), Write(dg));
      if (!first_dg) first_dg = dg, first_dh = dh;
      EXPECT_TRUE(Agrees(check::CompareBitwise("dg", dg.ToHost(), first_dg.ToHost())));
      EXPECT_TRUE(Agrees(check::CompareBitwise("dh", dh.ToHost(), first_dh.ToHost())));
    }
  }
}

// Trap second-backward-nan, with guarded and poisoned scratch memory.
TEST(RmsNorm, SecondBackwardNan) {
  for (const std::int64_t target : testing::InstructionSets()) {
    const testing::ScopedInstructionSet scope(target);
    testing::GuardedAllocator allocator;
    const Context ctx = Context().WithAllocator(allocator);
    const Shape shape{70, 23};
    const Tensor h = Normal(shape, DType::kBF16, "h"), dy = Normal(shape, DType::kBF16, "dy");
    const Tensor g = Normal({23}, DType::kBF16, "g");
    Tensor first;
    {
      const Tensor rstd = ctx.Empty({70}, DType::kF32), y = ctx.Empty(shape, DType::kBF16);
      const Tensor dh = ctx.Empty(shape, DType::kBF16), dg = ctx.Empty({23}, DType::kF32);
      for (int step = 0; step < 3; ++step) {
        RmsNormForward(ctx, h, {}, g, kEps, {}, rstd, Write(y));
        RmsNormBackward(ctx, dy, h, rstd, g, {}, Write(dh), Write(dg));
        EXPECT_TRUE(testing::IsFinite(dh));
        if (!first) first = dg.Clone();
        EXPECT_TRUE(Agrees(check::CompareBitwise("dg", dg, first)));
      }
    }
    EXPECT_THAT(allocator.TakeViolations(), ::testing::IsEmpty());
  }
}

TEST(RmsNorm, ZeroRowIsFinite) {
  for (const Variant& variant : Variants()) {
    const testing::ScopedInstructionSet scope(variant.target);
    const Tensor x = Tensor::Zeros({1, 40}, DType::kF32), y = Tensor::Empty({1, 40}, DType::kF32);
    const Tensor g = Normal({40}, DType::kF32, "g");
    RmsNormForward(variant.context(), x, {}, g, kEps, {}, {}, Write(y));
    for (std::int64_t i = 0; i < 40; ++i) EXPECT_EQ(At(y, i), 0.0);
  }
}

TEST(RmsNorm, GradientOfReference) {
  const Context ctx;
  const Shape shape{4, 9};
  const Tensor x = Normal(shape, DType::kF64, "x"), residual = Normal(shape, DType::kF64, "r");
  const Tensor g = Normal({9}, DType::kF64, "g"), w = Normal(shape, DType::kF64, "w");
  const Tensor w_h = Normal(shape, DType::kF64, "w_h");  // the residual stream's other reader
  const Tensor h = ctx.Empty(shape, DType::kF64), y = ctx.Empty(shape, DType::kF64);
  const Tensor rstd = ctx.Empty({4}, DType::kF64);
  const auto loss = [&] {
    RmsNormForward(ctx, x, residual, g, kEps, h, rstd, Write(y));
    double sum = 0;
    for (std::int64_t i = 0; i < y.numel(); ++i) sum += At(y, i) * At(w, i) + At(h, i) * At(w_h, i);
    return sum;
  };
  loss();
  const Tensor dh = ctx.Empty(shape, DType::kF64), dg = ctx.Empty({9}, DType::kF64);
  RmsNormBackward(ctx, w, h, rstd, g, w_h, Write(dh), Write(dg));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, x, dh)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dresidual", loss, residual, dh)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dg", loss, g, dg)));
}

TEST(RmsNorm, Errors) {
  const Context ctx;
  const Tensor x = ctx.Zeros({2, 8}, DType::kF32), y = ctx.Empty({2, 8}, DType::kF32);
  const auto message = [&](const Tensor& residual, const Tensor& g, double eps) {
    try {
      RmsNormForward(ctx, x, residual, g, eps, {}, {}, Write(y));
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(message({}, ctx.Zeros({7}, DType::kF32), kEps),
              HasSubstr("norm: g is f32 [7], not f32 [8]"));
  EXPECT_THAT(message(x, ctx.Zeros({8}, DType::kF32), kEps), HasSubstr("h must be given"));
  EXPECT_THAT(message({}, ctx.Zeros({8}, DType::kF32), -1), HasSubstr("eps -1 is negative"));
}

}  // namespace
}  // namespace cistron::ops
