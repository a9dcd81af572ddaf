// Implementations of grouped_gemm, for its list in grouped_gemm.cc.
#pragma once

#include "cistron/ops/grouped_gemm/grouped_gemm.h"

namespace cistron::ops {

extern const GroupedGemmImpl kGroupedGemmHopper;
extern const GroupedGemmImpl kGroupedGemmCuda;

namespace internal {

// Scalar reference: f64, f32, bf16. One reference product a group.
Support GroupedGemmRefSupports(const GroupedGemmProblem& problem);
void GroupedGemmRef(const Context& ctx, const GroupedGemmProblem& problem,
                    const Tensor& split_sizes, const Tensor& a, const Tensor& b, const Output& c);

// f32, bf16.
Support GroupedGemmCpuSupports(const GroupedGemmProblem& problem);
void GroupedGemmCpu(const Context& ctx, const GroupedGemmProblem& problem,
                    const Tensor& split_sizes, const Tensor& a, const Tensor& b, const Output& c);

}  // namespace internal
}  // namespace cistron::ops
