#include "cistron/ops/quantize/delayed_scaling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/quantize/quantize.h"

namespace cistron::ops {

void UpdateDelayedScale(const Context&, const Tensor& amax, DType format, int margin,
                        AmaxCompute algorithm, const Tensor& history, const Tensor& scale) {
  CISTRON_CHECK(history && history.rank() == 2 && history.dim(0) >= 1,
                "delayed scaling: history is {}, not [N, G] with N ≥ 1", Describe(history));
  const std::int64_t slots = history.dim(0), groups = history.dim(1);
  CheckTensor("delayed scaling", "history", history, {slots, groups}, DType::kF32);
  CheckTensor("delayed scaling", "amax", amax, {groups}, DType::kF32);
  CheckTensor("delayed scaling", "scale", scale, {groups}, DType::kF32);
  const float fmax = MaxOf(format);
  float* const h = history.data<float>();
  for (std::int64_t g = 0; g < groups; ++g) {
    h[g] = amax.data<float>()[g];
    float a = h[g];
    if (algorithm == AmaxCompute::kMax) {
      for (std::int64_t i = 1; i < slots; ++i) {
        const float slot = h[i * groups + g];
        if (std::isnan(slot) || slot > a) a = slot;
      }
    }
    if (a != 0 && std::isfinite(a)) {
      const float next = std::min(fmax / a, std::numeric_limits<float>::max());
      scale.data<float>()[g] = std::ldexp(next, -margin);
    }
    const float newest = h[g];
    for (std::int64_t i = 0; i + 1 < slots; ++i) h[i * groups + g] = h[(i + 1) * groups + g];
    h[(slots - 1) * groups + g] = newest;
    h[g] = 0;
  }
}

}  // namespace cistron::ops
