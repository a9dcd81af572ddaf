// Gradients against central differences in fp64.
//
// D(h) = (f(x + h) − f(x − h)) / 2h = f' + a·h² + b·h⁴ + …; R(h) = (4·D(h) − D(2h)) / 3 = f' −
// 4·b·h⁴ + … removes the first term of truncation. R(h) is compared with the analytic gradient
// under the bound
//
//   |R(h) − R(2h)|                     truncation: R(2h) errs 16 times as much as R(h), so the
//   difference
//                                      is about 15 times the error of R(h)
//   + 1.5·n·u·m / h                    rounding of the six values of f: n roundings of relative
//   size u =
//                                      2^-53 of terms whose absolute values sum to m; (4·2/2 +
//                                      2/4)/3 = 1.5
//   + n·u·(|analytic| + m)             rounding of the analytic gradient itself
//
// f must be smooth over x ± 4h: no change of a top-k choice.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "cistron/check/compare.h"
#include "cistron/tensor/tensor.h"

namespace cistron::testing {

struct GradientCheckOptions {
  double step = 0x1p-10;           // h, times max(1, |x|)
  double roundings = 4096;         // n: roundings on the longest path through f
  double magnitude = 0;            // m; 0: max(1, |f(x)|)
  std::int64_t max_elements = 64;  // checked elements of a tensor, drawn when it has more
};

// Σ a·b over all elements: a loss whose gradient with respect to a is b.
double Inner(const Tensor& a, const Tensor& b);

// The loss as a function of the values in `x` now. It is called with elements of x changed in
// place; x is restored bit for bit.
using ScalarFunction = std::function<double()>;

// `x` is a contiguous f64 tensor that f reads, `analytic` an f64 tensor of its shape.
check::Comparison CheckGradient(const std::string& name, const ScalarFunction& f, const Tensor& x,
                                const Tensor& analytic, const GradientCheckOptions& options = {});

// The derivative along a random direction v of all tensors at once, Σ⟨analytic, v⟩: seven
// evaluations whatever the size, and every element counts.
check::Comparison CheckGradientAlong(const std::string& name, const ScalarFunction& f,
                                     std::span<const Tensor> x, std::span<const Tensor> analytic,
                                     const GradientCheckOptions& options = {});

}  // namespace cistron::testing
