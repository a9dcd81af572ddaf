// Delayed scaling: the scale of the next step from the amax of past ones.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::ops {

enum class AmaxCompute : std::uint8_t { kMax, kMostRecent };

// One step, for each column g of `history` f32 [N, G] with `scale` f32 [G]:
//   slot 0 = amax[g] (f32 [G]);  a = the largest of all N slots (kMax) or slot 0 (kMostRecent)
//   scale = min(fmax / a, largest finite) · 2^-margin, unless a is 0 or not finite: then it stays
//   then every slot moves one down (slot 0 becomes slot N − 1) and slot 0 is cleared
// A slot that is NaN makes the maximum NaN. Source: Transformer Engine 2, delayed scaling.
void UpdateDelayedScale(const Context& ctx, const Tensor& amax, DType format, int margin,
                        AmaxCompute algorithm, const Tensor& history, const Tensor& scale);

}  // namespace cistron::ops
