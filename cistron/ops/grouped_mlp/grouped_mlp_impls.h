// Implementations of grouped_mlp, for its list in grouped_mlp.cc.
#pragma once

#include "cistron/ops/grouped_mlp/grouped_mlp.h"

namespace cistron::ops::internal {

// f64, f32, bf16.
GroupedMlpImpl CudaGroupedMlp();

// f32, bf16: see the head of grouped_mlp_cpu.cc.
GroupedMlpImpl CpuGroupedMlp();

// The reference ops one after another.
GroupedMlpImpl RefGroupedMlp();

}  // namespace cistron::ops::internal
