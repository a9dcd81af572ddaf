// What the Hopper implementation of grouped_mlp takes, with and without CUDA in the build.
#pragma once

#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"
#include "cistron/ops/grouped_mlp/grouped_mlp.h"

namespace cistron::ops::internal {

inline Support GroupedMlpHopperSupports(const GroupedMlpProblem& p) {
  if (p.dtype != DType::kBF16) return Support::No(fmt::format("only bf16, not {}", Name(p.dtype)));
  if (!p.aligned) return Support::No("a tensor or its rows do not begin at multiples of 16 bytes");
  if (p.ffn == 0 || p.out == 0) return Support::No("a width is 0");
  if (Support device = NeedsComputeCapability(90); !device) return device;
  if (Support fc2 =
          HopperShapeSupports(GroupedGemmKind::kDgrad, p.groups, p.max_rows, p.out, p.ffn);
      !fc2 || p.hidden == 0) {
    return fc2;
  }
  return HopperShapeSupports(GroupedGemmKind::kForward, p.groups, p.max_rows, 2 * p.ffn, p.hidden);
}

}  // namespace cistron::ops::internal
