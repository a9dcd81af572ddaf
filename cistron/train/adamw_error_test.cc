// The bound on AdamW's trajectories holds for gradients that err as it says, is tight enough to
// mean something, and takes a gradient of zero as exact.
#include "cistron/train/adamw_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cistron/testing/random.h"

namespace cistron::train {
namespace {

constexpr ops::AdamWConfig kConfig{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
constexpr double kRate = 1e-3;
constexpr int kSteps = 10;

// AdamW of one weight that starts at 1, in f64, as adamw.h says it.
class Trajectory {
 public:
  void Step(double g) {
    ++t_;
    p_ -= kRate * kConfig.weight_decay * p_;
    m_ = kConfig.beta1 * m_ + (1 - kConfig.beta1) * g;
    v_ = kConfig.beta2 * v_ + (1 - kConfig.beta2) * g * g;
    p_ -= kRate * (m_ / (1 - std::pow(kConfig.beta1, t_))) /
          (std::sqrt(v_ / (1 - std::pow(kConfig.beta2, t_))) + kConfig.eps);
  }
  double weight() const { return p_; }

 private:
  double p_ = 1, m_ = 0, v_ = 0;
  int t_ = 0;
};

// Gradients of a size, and the same with errors of up to `error`; returns max difference / bound.
TEST(AdamWErrorBound, HoldsForAnyErrorOfThatSize) {
  constexpr std::int64_t kWeights = 2000;
  constexpr double kError = 1e-6;
  for (const double size : {1e-2, 1e-4, 1e-5, 1e-6, 1e-7, 0.0}) {
    SCOPED_TRACE(size);
    AdamWErrorBound bound(kConfig);
    std::vector<Trajectory> a(kWeights), b(kWeights);
    for (int step = 0; step < kSteps; ++step) {
      const std::string name = std::to_string(size) + "." + std::to_string(step);
      const Tensor g = testing::Normal({kWeights}, DType::kF64, name, size);
      const Tensor noise = testing::Normal({kWeights}, DType::kF64, name + ".error", 1.0);
      const double clip = step % 2 == 0 ? 1.0 : 0.3;
      bound.Step(g, clip, kError, /*zeros_err=*/true, kRate);
      for (std::int64_t i = 0; i < kWeights; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double exact = ElementAsDouble(g, i);
        // Half of the errors have one sign at every step, half have any.
        const double sign = i % 2 == 0 ? 1.0 : std::copysign(1.0, ElementAsDouble(noise, i));
        a[at].Step(clip * exact);
        b[at].Step(clip * (exact + sign * kError));
      }
    }
    double largest = 0;
    for (std::int64_t i = 0; i < kWeights; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double difference = std::abs(a[at].weight() - b[at].weight());
      ASSERT_LE(difference, bound[i] + 1e-15) << "weight " << i;
      largest = std::max(largest, difference / bound[i]);
    }
    EXPECT_GT(largest, 0.1);  // some weight uses a good part of it
  }
}

// A gradient a thousand times its error moves its weight by about a thousandth of the rate a step.
TEST(AdamWErrorBound, IsSmallWhereTheGradientIsNot) {
  AdamWErrorBound bound(kConfig);
  const Tensor g = Tensor::Empty({2}, DType::kF32);
  g.data<float>()[0] = 1e-3f;
  g.data<float>()[1] = 1e-7f;  // below its error
  for (int step = 0; step < kSteps; ++step) bound.Step(g, 1.0, 1e-6, false, kRate);
  EXPECT_LT(bound[0], kSteps * kRate * 2.1e-3);
  EXPECT_GT(bound[1], kSteps * kRate);
  EXPECT_LT(bound[1], kSteps * kRate * 2.5);
}

TEST(AdamWErrorBound, ZeroIsExact) {
  AdamWErrorBound exact(kConfig), noise(kConfig);
  const Tensor zero = Tensor::Zeros({1}, DType::kF32);
  for (int step = 0; step < kSteps; ++step) {
    exact.Step(zero, 1.0, 1e-6, false, kRate);
    noise.Step(zero, 1.0, 1e-6, true, kRate);
  }
  EXPECT_EQ(exact[0], 0.0);
  EXPECT_GT(noise[0], kSteps * kRate * 0.9);
}

}  // namespace
}  // namespace cistron::train
