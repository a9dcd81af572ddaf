// Rounding-error bounds, derived (Higham, "Accuracy and stability of numerical algorithms", ch. 3).
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::check {

// Unit roundoff u of a type: 2^-53, 2^-24, 2^-8 (bf16), 2^-11 (f16), 2^-4 (e4m3), 2^-3 (e5m2).
double UnitRoundoff(DType dtype);

// γ_n = n·u / (1 − n·u): relative error of n roundings in `dtype`, in any order of summation.
double Gamma(std::int64_t n, DType dtype);

// Bound on |computed − exact| for a sum of `terms` products with Σ|a||b| = `abs_sum`, accumulated
// in `accumulator` and rounded once to `output`:  (γ_terms(acc) + u(out)·(1 + γ)) · abs_sum. Output
// rounding of a subnormal adds half of the type's smallest subnormal.
double DotBound(std::int64_t terms, double abs_sum, DType accumulator, DType output);

}  // namespace cistron::check
