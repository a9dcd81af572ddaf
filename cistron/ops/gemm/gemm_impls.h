// Implementations of gemm, for its list in gemm.cc.
#pragma once

#include "cistron/ops/gemm/gemm.h"

namespace cistron::ops {

extern const GemmImpl kGemmCublas;
extern const GemmImpl kGemmCuda;

namespace internal {

// Scalar reference: f64, f32, bf16.
Support GemmRefSupports(const GemmProblem& problem);
void GemmRef(const Context& ctx, const GemmProblem& problem, const Tensor& a, const Tensor& b,
             const Output& c);

// oneDNN: f32, bf16.
Support GemmCpuSupports(const GemmProblem& problem);
void GemmCpu(const Context& ctx, const GemmProblem& problem, const Tensor& a, const Tensor& b,
             const Output& c);

// For tests: cuBLAS is taken to have no algorithm for anything that it has not been asked yet.
inline bool cublas_knows_nothing = false;

// Whether GemmCpu multiplies bf16 natively; otherwise it widens to f32 first.
bool HasBf16Product();

}  // namespace internal
}  // namespace cistron::ops
