#include "cistron/train/adamw_error.h"

#include <algorithm>
#include <cmath>

namespace cistron::train {
namespace {

// Largest |m̂| / √v̂ after `steps` updates: with m̂ = Σ a_s g_s and v̂ = Σ b_s g_s² it is
// √(Σ a_s² / b_s).
double LargestUpdate(const ops::AdamWConfig& c, int steps) {
  const double correction1 = 1 - std::pow(c.beta1, steps);
  const double correction2 = 1 - std::pow(c.beta2, steps);
  double sum = 0;
  for (int age = 0; age < steps; ++age) {
    const double a = (1 - c.beta1) * std::pow(c.beta1, age) / correction1;
    const double b = (1 - c.beta2) * std::pow(c.beta2, age) / correction2;
    sum += a * a / b;
  }
  return std::sqrt(sum);
}

}  // namespace

void AdamWErrorBound::Step(const Tensor& grad, double clip, double error, bool zeros_err,
                           double lr) {
  elements_.resize(static_cast<std::size_t>(grad.numel()));
  ++step_;
  const double b1 = config_.beta1, b2 = config_.beta2;
  const double correction1 = 1 - std::pow(b1, step_), correction2 = 1 - std::pow(b2, step_);
  const double largest = LargestUpdate(config_, step_);
  for (std::size_t i = 0; i < elements_.size(); ++i) {
    Element& e = elements_[i];
    const double g = clip * ElementAsDouble(grad, static_cast<std::int64_t>(i));
    const double own = g != 0 || zeros_err ? clip * error : 0;
    e.m = b1 * e.m + (1 - b1) * g;
    e.v = b2 * e.v + (1 - b2) * g * g;
    e.error_m = b1 * e.error_m + (1 - b1) * own;
    e.error_v = b2 * e.error_v + (1 - b2) * own * own;
    e.bound *= 1 - lr * config_.weight_decay;
    const double mean_error = e.error_m / correction1;
    if (mean_error == 0) continue;  // and eps may be 0
    const double root = std::sqrt(e.v / correction2);
    const double root_error = std::sqrt(e.error_v / correction2);
    const double mean = std::abs(e.m / correction1);
    const double update = mean == 0 ? 0 : mean / (root + config_.eps);
    const double near =
        (mean_error + update * root_error) / (std::max(root - root_error, 0.0) + config_.eps);
    e.bound += lr * std::min(near, update + largest);
  }
}

}  // namespace cistron::train
