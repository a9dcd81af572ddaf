#include "cistron/train/machine_peak.h"

#include <algorithm>
#include <chrono>

#include "cistron/ops/gemm/gemm.h"

namespace cistron::train {

double MeasurePeakFlops(const ops::Context& ctx, DType dtype) {
  // Large enough that a product runs at the machine's rate, small enough to stay in its caches.
  constexpr std::int64_t kSize = 512;
  constexpr int kRepeats = 6;
  const Tensor a = ctx.Zeros({kSize, kSize}, dtype), b = ctx.Zeros({kSize, kSize}, dtype);
  const Tensor c = ctx.Empty({kSize, kSize}, dtype);
  double fastest = 0;
  for (int i = 0; i < kRepeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ops::Gemm(ctx, a, ops::Transpose::kNo, b, ops::Transpose::kYes, ops::Write(c));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    fastest = std::max(fastest, 2.0 * kSize * kSize * kSize / took.count());
  }
  return fastest;
}

}  // namespace cistron::train
