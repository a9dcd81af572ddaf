// Implementations of permute, for its list in permute.cc.
#pragma once

#include "cistron/ops/permute/permute.h"

namespace cistron::ops {

extern const PermuteImpl kPermuteCuda;

namespace internal {

// Number of rows that have an assignment, by the counts, which must lie on the host.
std::int64_t RoutedRows(const RowMap& map);

// What all host implementations share.
RowMap BuildRowMapHost(const Context& ctx, const Tensor& experts, std::int64_t num_experts);
void PermuteSlotsHost(const Context& ctx, const RowMap& map, const Tensor& slots,
                      const Output& rows);
void UnpermuteSlotsHost(const Context& ctx, const RowMap& map, const Tensor& rows,
                        const Output& slots);

// Scalar reference: f64, f32, bf16.
Support PermuteRefSupports(const PermuteProblem& problem);
void PermuteRef(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows);
void UnpermuteRef(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
                  const Output& y);
void UnpermuteBackwardRef(const Context& ctx, const RowMap& map, const Tensor& dy,
                          const Tensor& rows, const Tensor& probs, const Output& drows,
                          const Output& dprobs);

// Vectorised: f32, bf16.
Support PermuteCpuSupports(const PermuteProblem& problem);
void PermuteCpu(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows);
void UnpermuteCpu(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
                  const Output& y);
void UnpermuteBackwardCpu(const Context& ctx, const RowMap& map, const Tensor& dy,
                          const Tensor& rows, const Tensor& probs, const Output& drows,
                          const Output& dprobs);

}  // namespace internal
}  // namespace cistron::ops
