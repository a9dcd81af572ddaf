// Scalar reference of reduce.
#include <algorithm>

#include "cistron/ops/reduce/reduce_impls.h"

namespace cistron::ops {
namespace {

// Σ term(i) over [0, n): blocks in order, elements in order within a block.
template <class F>
double BlockedSum(std::int64_t n, F&& term) {
  double total = 0;
  for (std::int64_t begin = 0; begin < n; begin += kReduceBlock) {
    double block = 0;
    for (std::int64_t i = begin; i < std::min(n, begin + kReduceBlock); ++i) block += term(i);
    total += block;
  }
  return total;
}

Support SupportsReduce(const ReduceProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

void SumOfSquaresRef(const Context&, const Tensor& x, const Output& out) {
  DispatchFloat("SumOfSquares", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = x.data<T>();
    StoreScalar(out, BlockedSum(x.numel(), [&](std::int64_t i) {
                  const auto value = static_cast<Compute<T>>(values[i]);
                  return static_cast<double>(value * value);
                }));
  });
}

void WeightedSumRef(const Context&, const Tensor& x, const Tensor& weights, const Output& out) {
  DispatchFloat("WeightedSum", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = x.data<T>();
    const float* w32 = weights && weights.dtype() == DType::kF32 ? weights.data<float>() : nullptr;
    const double* w64 =
        weights && weights.dtype() == DType::kF64 ? weights.data<double>() : nullptr;
    StoreScalar(out, BlockedSum(x.numel(), [&](std::int64_t i) {
                  const double value = static_cast<Compute<T>>(values[i]);
                  if (w32) return value * static_cast<double>(w32[i]);
                  return w64 ? value * w64[i] : value;
                }));
  });
}

void AddToRef(const Context&, const Tensor& x, const Tensor& y) {
  DispatchFloat("AddTo", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      to[i] = T(static_cast<Compute<T>>(to[i]) + static_cast<Compute<T>>(from[i]));
    }
  });
}

}  // namespace

constinit const ReduceImpl kReduceRef = {"ref",
                                         SupportsReduce,
                                         {SumOfSquaresRef, WeightedSumRef, AddToRef, ClipFactorHost,
                                          SumOfSquaresOfAllHost, GateUpdateHost}};

}  // namespace cistron::ops
