// How far two AdamW trajectories of one parameter drift apart when their gradients differ a little.
//
// Adam divides by the size of the gradient, so an error of a gradient moves a weight by as much of
// the rate as it is of that gradient: next to nothing where the gradient is well above its error,
// up to twice the rate where it is rounding noise. With |δg| ≤ ε_s at step s and hats as in AdamW
// (m̂ the bias-corrected mean, v̂ that of the squares, û = m̂ / (√v̂ + eps)):
//   |δm̂| ≤ M = mean of ε with the weights of m̂          (m̂ is linear)
//   |δ√v̂| ≤ V = √ mean of ε² with the weights of v̂      (√v̂ is a weighted 2-norm)
//   û' − û = (δm̂ − û·δ√v̂) / (√v̂' + eps)
//   |δû| ≤ (M + |û|·V) / (max(√v̂ − V, 0) + eps),  and ≤ |û| + Û,
// where Û bounds |û'| of any gradients (Cauchy–Schwarz over both weights). A step adds lr·|δû|;
// decay multiplies by (1 − lr·wd). Not in it: the rounding of the update itself, and that gradients
// differ by more once the weights have drifted.
#pragma once

#include <vector>

#include "cistron/ops/optimizer/adamw.h"

namespace cistron::train {

class AdamWErrorBound {
 public:
  explicit AdamWErrorBound(const ops::AdamWConfig& config) : config_(config) {}

  // One update with the gradient clip·`grad`, whose elements err by at most clip·`error`. A
  // gradient of zero is exact (an expert without tokens, a letter that is not there) unless
  // `zeros_err`.
  void Step(const Tensor& grad, double clip, double error, bool zeros_err, double lr);

  // Bound on the difference of weight `i` so far; there must have been a step.
  double operator[](std::int64_t i) const { return elements_[static_cast<std::size_t>(i)].bound; }

 private:
  struct Element {
    double m = 0, v = 0;              // averages of g and g²
    double error_m = 0, error_v = 0;  // of ε and ε², with the same weights
    double bound = 0;
  };
  ops::AdamWConfig config_;
  std::vector<Element> elements_;
  int step_ = 0;
};

}  // namespace cistron::train
