// The comparator of the tests, of `cistron verify` and of the benchmarks.
//
// An element passes iff |got − expected| ≤ bound, written positively so that a NaN anywhere fails.
// NaN and Inf match by class: NaN only NaN, +Inf only +Inf. Bounds come from functions (bounds.h),
// not literals.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cistron/tensor/tensor.h"

namespace cistron::check {

struct Comparison {
  bool ok = true;
  std::int64_t compared = 0;
  std::int64_t failed = 0;
  // The element with the largest error relative to its bound.
  std::int64_t worst_index = -1;
  double worst_got = 0, worst_expected = 0, worst_error = 0, worst_bound = 0;
  // "gemm.y: 3 of 64 elements differ; worst at [2, 5]: got …, expected …, error … > bound …"
  std::string message;

  explicit operator bool() const { return ok; }
};

// Element-wise with one bound for every element. Shapes must be equal; dtypes may differ. Two i64
// tensors are compared as integers.
Comparison Compare(const std::string& name, const Tensor& got, const Tensor& expected,
                   double bound);
// With a bound for each flat index.
Comparison Compare(const std::string& name, const Tensor& got, const Tensor& expected,
                   const std::function<double(std::int64_t)>& bound);
// Bit for bit, signs of zero and NaN payloads included. Dtypes must be equal.
Comparison CompareBitwise(const std::string& name, const Tensor& got, const Tensor& expected);
// max|got − expected| ≤ bound · max|expected| over the finite elements: the measure of the golden
// files.
Comparison CompareToMaximum(const std::string& name, const Tensor& got, const Tensor& expected,
                            double bound);

}  // namespace cistron::check
