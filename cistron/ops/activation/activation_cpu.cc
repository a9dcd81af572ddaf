// SwiGLU on the CPU.
#include "cistron/ops/activation/activation_impls.h"

namespace cistron::ops::internal {

Support SwiGluCpuSupports(const SwiGluProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

void SwiGluForwardCpu(const Context& ctx, std::int64_t rows, const Tensor& x,
                      const Tensor& row_scale, const Output& y) {
  SwiGluForwardRef(ctx, rows, x, row_scale, y);
}

void SwiGluBackwardCpu(const Context& ctx, std::int64_t rows, const Tensor& dy, const Tensor& x,
                       const Tensor& row_scale, const Output& dx, const Output& dscale,
                       const Output& y_out) {
  SwiGluBackwardRef(ctx, rows, dy, x, row_scale, dx, dscale, y_out);
}

}  // namespace cistron::ops::internal
