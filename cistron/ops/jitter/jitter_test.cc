#include "cistron/ops/jitter/jitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistron/base/philox.h"
#include "cistron/testing/gradient_check.h"
#include "cistron/testing/implementations.h"
#include "cistron/testing/poison.h"
#include "cistron/testing/random.h"

namespace cistron::ops {
namespace {

using testing::Agrees;

Tensor Step(std::int64_t step) {
  const Tensor t = Tensor::Empty({}, DType::kI64);
  *t.data<std::int64_t>() = step;
  return t;
}

// The definition, element by element.
TEST(Jitter, IsAFunctionOfSeedStepLayerAndPlace) {
  const JitterConfig config{.amplitude = 0.25, .seed = 9, .layer = 3, .first_token = 5};
  const RandomStream stream(9, "router_jitter", 7, 3);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAccumulate}) {
      for (const std::int64_t width : {1, 7, 32}) {
        const Tensor x = testing::Normal({6, width}, dtype, "x");
        const Tensor before = testing::Normal({6, width}, dtype, "y");
        const Tensor expected = Tensor::Empty(x.shape(), dtype);
        DispatchFloat("test", dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          using C = Compute<T>;
          for (std::int64_t i = 0; i < x.numel(); ++i) {
            const auto u =
                static_cast<C>(stream.Uniform(static_cast<std::uint64_t>(5 * width + i)));
            C value = static_cast<C>(x.data<T>()[i]) * (1 + C(0.25) * (2 * u - 1));
            if (mode == WriteMode::kAccumulate) value += static_cast<C>(before.data<T>()[i]);
            expected.data<T>()[i] = static_cast<T>(value);
          }
        });
        testing::ForEachImplementation(
            JitterImpls(), JitterProblem{dtype, 6, width}, [&](const Context& ctx) {
              const testing::PaddedTensor y = testing::MakePadded({6, width}, dtype, 3);
              if (mode == WriteMode::kAccumulate) Convert(before, y.used);
              Jitter(ctx, config, Step(7), x, {y.used, mode});
              EXPECT_TRUE(Agrees(check::CompareBitwise("y", y.used, expected)));
              EXPECT_TRUE(testing::IsPoisoned(y.tail));
            });
      }
    }
  }
}

// A batch cut anywhere has the factors of the whole; another step, layer or seed has others.
TEST(Jitter, DoesNotDependOnTheCut) {
  const Tensor x = Tensor::Empty({9, 13}, DType::kF32);
  for (float& v : x.span<float>()) v = 1;
  const auto run = [&](JitterConfig config, std::int64_t step, std::int64_t begin,
                       std::int64_t rows) {
    config.amplitude = 0.5;
    const Tensor y = Tensor::Empty({rows, 13}, DType::kF32);
    Jitter(Context(), config, Step(step), x.Slice(0, begin, rows), Write(y));
    return y;
  };
  const Tensor whole = run({}, 1, 0, 9);
  for (const std::int64_t begin : {1, 4, 8}) {
    const Tensor part = run({.first_token = begin}, 1, begin, 9 - begin);
    EXPECT_TRUE(Agrees(check::CompareBitwise("part", part, whole.Slice(0, begin, 9 - begin))));
  }
  EXPECT_FALSE(check::CompareBitwise("step", run({}, 2, 0, 9), whole).ok);
  EXPECT_FALSE(check::CompareBitwise("layer", run({.layer = 1}, 1, 0, 9), whole).ok);
  EXPECT_FALSE(check::CompareBitwise("seed", run({.seed = 1}, 1, 0, 9), whole).ok);
}

// Uniform over (1 − j, 1 + j): n draws have mean 1 ± j·6/√(12·n)·2 (six standard deviations), all
// within the interval, and come close to both ends.
TEST(Jitter, IsUniformAroundOne) {
  const Tensor x = Tensor::Empty({100, 100}, DType::kF64);
  for (double& v : x.span<double>()) v = 1;
  Jitter(Context(), {.amplitude = 0.1, .seed = 4}, Step(1), x, Write(x));  // in place
  double sum = 0, low = 2, high = 0;
  for (const double v : x.span<double>()) {
    sum += v;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  EXPECT_NEAR(sum / 1e4, 1, 0.1 * 6 * 2 / std::sqrt(12 * 1e4));
  EXPECT_GE(low, 0.9);
  EXPECT_LT(low, 0.9 + 0.2 * 0.002);  // missed with probability 0.998^10000 = 2e-9
  EXPECT_LE(high, 1.1);
  EXPECT_GT(high, 1.1 - 0.2 * 0.002);
}

TEST(Jitter, ErrorsNameTheValue) {
  const Tensor x = Tensor::Zeros({2, 3}, DType::kF32);
  const auto with = [&](const JitterConfig& config, const Tensor& step) {
    return [=] { Jitter(Context(), config, step, x, Write(x)); };
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(with({.amplitude = 1}, Step(1)),
              ::testing::ThrowsMessage<Error>(HasSubstr("amplitude 1 is outside [0, 1)")));
  EXPECT_THAT(with({.amplitude = 0.1}, Tensor()),
              ::testing::ThrowsMessage<Error>(HasSubstr("step is")));
}

// Backward is the same map of dy.
TEST(Jitter, GradientOfReference) {
  const Context ctx = Context().WithImpl("ref");
  const JitterConfig config{.amplitude = 0.3, .seed = 4};
  const Tensor x = testing::Normal({4, 5}, DType::kF64, "x");
  const Tensor dy = testing::Normal({4, 5}, DType::kF64, "dy");
  const Tensor y = Tensor::Empty({4, 5}, DType::kF64), dx = Tensor::Empty({4, 5}, DType::kF64);
  const auto loss = [&] {
    Jitter(ctx, config, Step(2), x, Write(y));
    return testing::Inner(y, dy);
  };
  Jitter(ctx, config, Step(2), dy, Write(dx));
  EXPECT_TRUE(Agrees(testing::CheckGradient("dx", loss, x, dx)));
}

}  // namespace
}  // namespace cistron::ops
