// What the Hopper implementation of grouped_gemm takes, with and without CUDA in the build.
#pragma once

#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

namespace cistron::ops::internal {

inline Support GroupedGemmHopperSupports(const GroupedGemmProblem& p) {
  if (p.in_dtype != DType::kBF16) {
    return Support::No(fmt::format("operands are bf16, not {}", Name(p.in_dtype)));
  }
  // Its tiles of a sum over nothing would hold what registers held before.
  if (p.n == 0 || p.k == 0) return Support::No("a width is 0");
  if (!p.aligned) return Support::No("a tensor or its rows do not begin at multiples of 16 bytes");
  if (Support device = NeedsComputeCapability(90); !device) return device;
  return HopperShapeSupports(p.kind, p.groups, p.max_rows, p.n, p.k);
}

}  // namespace cistron::ops::internal
