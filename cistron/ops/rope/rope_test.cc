// rope: the table against closed forms, rotations against the fp64 reference, every implementation
// and instruction set bit for bit against the reference of its dtype.
#include "cistron/ops/rope/rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/ops/packed_sequences.h"
#include "cistron/ops/rope/rope_cases.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;

constexpr std::int64_t kPositions = 64;

Tensor RandomPositions(std::int64_t tokens) {
  const Tensor t = Tensor::Empty({tokens}, DType::kI64);
  testing::FillIntegers(t, "positions", 0, kPositions);
  return t;
}

TEST(Rope, TableHoldsTheAngles) {
  const Tensor f64 = RopeTable(100, 16, 10000.0, DType::kF64);
  const Tensor f32 = RopeTable(100, 16, 10000.0, DType::kF32);
  for (std::int64_t p = 0; p < 100; ++p) {
    for (std::int64_t i = 0; i < 8; ++i) {
      const double angle =
          static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / 16.0);
      const std::int64_t at = (p * 8 + i) * 2;
      EXPECT_NEAR(ElementAsDouble(f64, at), std::cos(angle), 0x1p-50 * (1 + angle));
      EXPECT_NEAR(ElementAsDouble(f64, at + 1), std::sin(angle), 0x1p-50 * (1 + angle));
      // The angle is an f32: six roundings on the way to it, then one of the result.
      const double bound = check::Gamma(6, DType::kF32) * angle + 0x1p-23;
      EXPECT_NEAR(ElementAsDouble(f32, at), std::cos(angle), bound);
      EXPECT_NEAR(ElementAsDouble(f32, at + 1), std::sin(angle), bound);
    }
  }
}

TEST(Rope, AgreesWithFp64) {
  const Context ref = Context().WithImpl("ref");
  for (const RopeCase& c : RopeCases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("[{}, {}·{}] {}", c.tokens, c.heads, c.head_dim, Name(dtype)));
      const Tensor table = RopeTable(kPositions, c.head_dim, 1e4, DType::kF32);
      const Tensor table64 = ConvertTo(table, DType::kF64);
      const Tensor positions = RandomPositions(c.tokens);
      const Tensor x = testing::Normal({c.tokens, c.heads * c.head_dim}, dtype, "x");
      for (const bool inverse : {false, true}) {
        const Tensor got = x.Clone(), truth = ConvertTo(x, DType::kF64);
        (inverse ? RopeBackward : RopeForward)(ref, table, positions, c.head_dim, got);
        (inverse ? RopeBackward : RopeForward)(ref, table64, positions, c.head_dim, truth);
        const std::int64_t half = c.head_dim / 2;
        EXPECT_TRUE(Agrees(check::Compare("x", got, truth, [&](std::int64_t i) {
          // |x cos| + |y sin| of the pair.
          const std::int64_t other = i % c.head_dim < half ? i + half : i - half;
          const double sum = std::abs(ElementAsDouble(x, i)) + std::abs(ElementAsDouble(x, other));
          return check::DotBound(2, sum, DType::kF32, dtype);
        })));
      }
    }
  }
}

TEST(Rope, EveryImplementationGivesTheBitsOfTheReference) {
  for (const RopeCase& c : RopeCases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t margin : {0, 3}) {
        SCOPED_TRACE(fmt::format("[{}, {}·{}] {} margin {}", c.tokens, c.heads, c.head_dim,
                                 Name(dtype), margin));
        const Tensor table = RopeTable(kPositions, c.head_dim, 1e4, DType::kF32);
        const Tensor positions = RandomPositions(c.tokens);
        const std::int64_t width = c.heads * c.head_dim;
        // A view of some columns; the rest, and rows behind, are poison and stay so.
        const Tensor whole = Tensor::Empty({c.tokens + 2, width + 2 * margin}, dtype);
        FillPoison(whole);
        const Tensor values = testing::Normal({c.tokens, width}, dtype, "x");
        for (std::int64_t t = 0; t < c.tokens; ++t) {
          Convert(values.Select(t), whole.Select(t).Slice(0, margin, width));
        }
        for (const bool inverse : {false, true}) {
          const auto rotate = [&](const Context& ctx) {
            const Tensor copy = whole.Clone();
            (inverse ? RopeBackward : RopeForward)(
                ctx, table, positions, c.head_dim,
                copy.Slice(0, 0, c.tokens).Slice(1, margin, width));
            return copy;
          };
          const Tensor expected = rotate(Context().WithImpl("ref"));
          testing::ForEachImplementation(
              RopeImpls(), RopeProblem{dtype, c.tokens, c.heads, c.head_dim},
              [&](const Context& ctx) {
                for (const int threads : {1, 3}) {
                  const testing::ThreadsForScope scope_of_threads(threads);
                  EXPECT_TRUE(Agrees(check::CompareBitwise("x", rotate(ctx), expected)));
                }
              });
        }
      }
    }
  }
}

// Position 0 of every sequence is not rotated, and scores depend on distance alone.
TEST(Rope, PositionsRestartAtASequence) {
  const PackedSequences sequences = PackedFromLengths(std::vector<std::int64_t>{3, 1, 4});
  const Tensor table = RopeTable(8, 8, 1e4, DType::kF32);
  const Tensor x = testing::Normal({8, 8}, DType::kF32, "x"), rotated = x.Clone();
  RopeForward(Context(), table, sequences.positions, 8, rotated);
  for (const std::int64_t t : {0, 3, 4}) {
    EXPECT_TRUE(Agrees(check::CompareBitwise("row", rotated.Select(t), x.Select(t))));
  }
}

TEST(Rope, GradientOfReference) {
  const Context ctx;
  const Tensor table = RopeTable(kPositions, 6, 1e4, DType::kF64);
  const Tensor positions = RandomPositions(5);
  const Tensor x = testing::Normal({5, 12}, DType::kF64, "x");
  const Tensor w = testing::Normal({5, 12}, DType::kF64, "w");
  const auto loss = [&] {
    const Tensor y = x.Clone();
    RopeForward(ctx, table, positions, 6, y);
    double sum = 0;
    for (std::int64_t i = 0; i < y.numel(); ++i)
      sum += ElementAsDouble(y, i) * ElementAsDouble(w, i);
    return sum;
  };
  const Tensor dx = w.Clone();
  RopeBackward(ctx, table, positions, 6, dx);
  EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, x, dx)));
}

TEST(Rope, Errors) {
  const Context ctx;
  const Tensor table = RopeTable(4, 8, 1e4, DType::kF32);
  const auto message = [&](std::int64_t head_dim, std::int64_t position, std::int64_t width) {
    const Tensor positions = Tensor::Zeros({2}, DType::kI64);
    positions.data<std::int64_t>()[1] = position;
    try {
      RopeForward(ctx, table, positions, head_dim, ctx.Zeros({2, width}, DType::kF32));
    } catch (const Error& e) {
      return e.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(message(7, 0, 16), HasSubstr("head_dim 7 is not even"));
  EXPECT_THAT(message(8, 4, 16), HasSubstr("position 4 of token 1 is not in [0, 4)"));
  EXPECT_THAT(message(8, -1, 16), HasSubstr("position -1"));
  EXPECT_THAT(message(8, 0, 12), HasSubstr("x is f32 [2, 12]"));
  EXPECT_THAT(message(4, 0, 16), HasSubstr("table is f32 [4, 4, 2], not f32 [positions, 2, 2]"));
}

}  // namespace
}  // namespace cistron::ops
