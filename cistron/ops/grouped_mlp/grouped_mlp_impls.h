// Implementations of grouped_mlp, for its list in grouped_mlp.cc.
#pragma once

#include "cistron/ops/grouped_mlp/grouped_mlp.h"

namespace cistron::ops {

// bf16 on compute capability 9.0.
extern const GroupedMlpImpl kGroupedMlpHopper;

namespace internal {

// f64, f32, bf16.
GroupedMlpImpl CudaGroupedMlp();
// What it runs: the products and activations of all groups, one op after another.
void GroupedMlpForwardByOps(const Context& ctx, const GroupedMlpProblem& p,
                            const GroupedMlpForwardArgs& args);
void GroupedMlpBackwardByOps(const Context& ctx, const GroupedMlpProblem& p,
                             GroupedMlpBackwardArgs&& args);
// What is left when dP and A are there. Lets go of dy, A and x, in this order.
void GroupedMlpWeightAndInputGradients(const Context& ctx, GroupedMlpBackwardArgs&& args,
                                       const Tensor& dpre, Tensor act);

// f32, bf16: see the head of grouped_mlp_cpu.cc.
GroupedMlpImpl CpuGroupedMlp();

// The reference ops one after another.
GroupedMlpImpl RefGroupedMlp();

}  // namespace internal
}  // namespace cistron::ops
