// Implementations of SwiGLU, for its list in activation.cc.
#pragma once

#include "cistron/ops/activation/activation.h"

namespace cistron::ops::internal {

// Scalar reference: f64, f32, bf16.
Support SwiGluRefSupports(const SwiGluProblem& problem);
void SwiGluForwardRef(const Context& ctx, std::int64_t rows, const Tensor& x,
                      const Tensor& row_scale, const Output& y);
void SwiGluBackwardRef(const Context& ctx, std::int64_t rows, const Tensor& dy, const Tensor& x,
                       const Tensor& row_scale, const Output& dx, const Output& dscale,
                       const Output& y_out);

// Vectorised with Highway: f32, bf16.
Support SwiGluCpuSupports(const SwiGluProblem& problem);
void SwiGluForwardCpu(const Context& ctx, std::int64_t rows, const Tensor& x,
                      const Tensor& row_scale, const Output& y);
void SwiGluBackwardCpu(const Context& ctx, std::int64_t rows, const Tensor& dy, const Tensor& x,
                       const Tensor& row_scale, const Output& dx, const Output& dscale,
                       const Output& y_out);

}  // namespace cistron::ops::internal
