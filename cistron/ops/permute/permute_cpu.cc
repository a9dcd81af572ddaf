// permute on the CPU.
#include "cistron/ops/permute/permute_impls.h"

namespace cistron::ops::internal {

Support PermuteCpuSupports(const PermuteProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

void PermuteCpu(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows) {
  PermuteRef(ctx, map, x, rows);
}

void UnpermuteCpu(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
                  const Output& y) {
  UnpermuteRef(ctx, map, rows, probs, y);
}

void UnpermuteBackwardCpu(const Context& ctx, const RowMap& map, const Tensor& dy,
                          const Tensor& rows, const Tensor& probs, const Output& drows,
                          const Output& dprobs) {
  UnpermuteBackwardRef(ctx, map, dy, rows, probs, drows, dprobs);
}

}  // namespace cistron::ops::internal
