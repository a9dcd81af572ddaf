// Implementations of SwiGLU, for its list in activation.cc.
#pragma once

#include "cistron/ops/activation/activation.h"

namespace cistron::ops::internal {

// On a GPU, with the other activations (scaled_activation_cuda.cu).
extern const SwiGluImpl kSwiGluCuda;

// Scalar reference: f64, f32, bf16.
Support SwiGluRefSupports(const SwiGluProblem& problem);
void SwiGluForwardRef(const Context& ctx, const Tensor& x, const Tensor& row_scale,
                      const Tensor& split_sizes, const Output& y);
void SwiGluBackwardRef(const Context& ctx, const Tensor& dy, const Tensor& x,
                       const Tensor& row_scale, const Tensor& split_sizes, const Output& dx,
                       const Output& dscale, const Output& y_out);

// Vectorised with Highway: f32, bf16.
Support SwiGluCpuSupports(const SwiGluProblem& problem);
void SwiGluForwardCpu(const Context& ctx, const Tensor& x, const Tensor& row_scale,
                      const Tensor& split_sizes, const Output& y);
void SwiGluBackwardCpu(const Context& ctx, const Tensor& dy, const Tensor& x,
                       const Tensor& row_scale, const Tensor& split_sizes, const Output& dx,
                       const Output& dscale, const Output& y_out);

}  // namespace cistron::ops::internal
