// grouped_bias against fp64 sums under derived bounds, in both modes; counts, poison, errors.
#include "cistron/ops/grouped_bias/grouped_bias.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Case {
  std::vector<std::int64_t> counts;
  std::int64_t width;
};
const Case kCases[] = {
    {{0, 1, 7, 33}, 24}, {{5, 40}, 600}, {{0, 0, 50}, 7}, {{4}, 1}, {{0, 0}, 16}};

void CheckCase(const Context& ctx, const Case& c, DType dtype, bool scaled) {
  const auto groups = static_cast<std::int64_t>(c.counts.size());
  const Tensor splits = Tensor::FromSpan<std::int64_t>({groups}, c.counts);
  std::int64_t used = 0;
  for (const std::int64_t n : c.counts) used += n;
  const auto y = testing::Pad(testing::Normal({used, c.width}, dtype, "y"), 2);
  const Tensor before = y.used.Clone();
  const auto dy = testing::Pad(testing::Normal({used, c.width}, dtype, "dy"), 2);
  const Tensor bias = testing::Normal({groups, c.width}, dtype, "bias");
  const auto scale = testing::Pad(testing::Uniform({used}, DType::kF32, "s"), 2);
  const Tensor row_scale = scaled ? scale.whole : Tensor();
  GroupedBiasForward(ctx, bias, row_scale, splits, y.whole);
  EXPECT_TRUE(testing::IsPoisoned(y.tail));
  for (const bool add : {false, true}) {
    const Output dbias{testing::Normal({groups, c.width}, DType::kF32, "old"),
                       add ? WriteMode::kAccumulate : WriteMode::kWrite};
    const Tensor old = dbias.tensor.Clone();
    if (!add) FillPoison(dbias.tensor);
    const auto ds = testing::Pad(testing::Normal({used}, DType::kF32, "old scale"), 2);
    const Tensor old_scale = ds.used.Clone();
    GroupedBiasBackward(ctx, dy.whole, bias, row_scale, splits, dbias, {ds.whole, dbias.mode});
    EXPECT_TRUE(testing::IsPoisoned(ds.tail));
    std::int64_t row = 0;
    for (std::int64_t e = 0; e < groups; ++e) {
      std::vector<double> sum(static_cast<std::size_t>(c.width)), size(sum);
      for (const std::int64_t end = row + c.counts[static_cast<std::size_t>(e)]; row < end; ++row) {
        const double s = scaled ? ElementAsDouble(scale.used, row) : 1.0;
        double dot = 0, dot_size = 0;
        for (std::int64_t j = 0; j < c.width; ++j) {
          const double b = ElementAsDouble(bias, e * c.width + j);
          const double d = ElementAsDouble(dy.used, row * c.width + j);
          const double old_y = ElementAsDouble(before, row * c.width + j);
          EXPECT_NEAR(ElementAsDouble(y.used, row * c.width + j), old_y + s * b,
                      check::DotBound(2, std::abs(old_y) + std::abs(s * b), DType::kF32, dtype));
          dot += d * b;
          dot_size += std::abs(d * b);
          sum[static_cast<std::size_t>(j)] += s * d;
          size[static_cast<std::size_t>(j)] += std::abs(s * d);
        }
        const double old_s = add ? ElementAsDouble(old_scale, row) : 0;
        EXPECT_NEAR(
            ElementAsDouble(ds.used, row), dot + old_s,
            check::DotBound(c.width + 1, dot_size + std::abs(old_s), DType::kF32, DType::kF32));
      }
      for (std::int64_t j = 0; j < c.width; ++j) {
        const double old_b = add ? ElementAsDouble(old, e * c.width + j) : 0;
        EXPECT_NEAR(ElementAsDouble(dbias.tensor, e * c.width + j),
                    sum[static_cast<std::size_t>(j)] + old_b,
                    check::DotBound(used + 2, size[static_cast<std::size_t>(j)] + std::abs(old_b),
                                    DType::kF32, DType::kF32));
      }
    }
  }
}

TEST(GroupedBias, AgreesWithFp64InBothModes) {
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool scaled : {false, true}) {
        SCOPED_TRACE(
            fmt::format("{} {} {}", ::testing::PrintToString(c.counts), Name(dtype), scaled));
        const GroupedBiasProblem problem{dtype, static_cast<std::int64_t>(c.counts.size()), 0,
                                         c.width};
        testing::ForEachImplementation(GroupedBiasImpls(), problem, [&](const Context& ctx) {
          CheckCase(ctx, c, dtype, scaled);
        });
      }
    }
  }
}

TEST(GroupedBias, ErrorsNameTheArgument) {
  const Context ctx;
  const Tensor y = ctx.Zeros({4, 8}, DType::kF32);
  const Tensor splits = Tensor::FromSpan<std::int64_t>({2}, std::vector<std::int64_t>{1, 3});
  EXPECT_THAT(
      [&] {
        GroupedBiasForward(ctx, ctx.Zeros({2, 7}, DType::kF32), {}, splits, y);
      },
      ThrowsMessage<Error>(HasSubstr("bias")));
  EXPECT_THAT(
      [&] {
        GroupedBiasForward(ctx, ctx.Zeros({2, 8}, DType::kF32), ctx.Zeros({3}, DType::kF32), splits,
                           y);
      },
      ThrowsMessage<Error>(HasSubstr("row_scale")));
}

TEST(GroupedBias, GradientOfReference) {
  const Context ctx = Context().WithImpl("ref");
  const Tensor splits = Tensor::FromSpan<std::int64_t>({3}, std::vector<std::int64_t>{2, 0, 3});
  const Tensor bias = testing::Normal({3, 4}, DType::kF64, "bias");
  const Tensor scale = testing::Uniform({5}, DType::kF64, "scale", 0.2, 1.0);
  const Tensor dy = testing::Normal({5, 4}, DType::kF64, "dy");
  const auto loss = [&] {
    const Tensor y = Tensor::Zeros({5, 4}, DType::kF64);
    GroupedBiasForward(ctx, bias, scale, splits, y);
    return testing::Inner(y, dy);
  };
  const Tensor dbias = Tensor::Empty({3, 4}, DType::kF64), ds = Tensor::Empty({5}, DType::kF64);
  GroupedBiasBackward(ctx, dy, bias, scale, splits, Write(dbias), Write(ds));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dbias", loss, bias, dbias)));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dscale", loss, scale, ds)));
}

}  // namespace
}  // namespace cistron::ops
