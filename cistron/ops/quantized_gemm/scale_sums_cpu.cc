#include "cistron/ops/quantized_gemm/scale_sums.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantized_gemm/scale_sums_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::StoreFloat;

template <class T>
void Scale(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
           T* to) {
  const FloatTag d;
  const auto a = hn::Set(d, scale_a), b = hn::Set(d, scale_b);
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const auto v = hn::Mul(hn::Mul(hn::LoadU(d, sums + j), a), b);
    StoreFloat(accumulate ? hn::Add(LoadFloat(to + j), v) : v, to + j);
  }
  for (; j < n; ++j) {
    const float v = sums[j] * scale_a * scale_b;
    to[j] = T(accumulate ? static_cast<float>(to[j]) + v : v);
  }
}

void ScaleF32(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
              float* to) {
  Scale(sums, n, scale_a, scale_b, accumulate, to);
}
void ScaleBF16(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
               bf16* to) {
  Scale(sums, n, scale_a, scale_b, accumulate, to);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(ScaleF32);
HWY_EXPORT(ScaleBF16);

}  // namespace

void ScaleSums(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
               float* to) {
  HWY_DYNAMIC_DISPATCH(ScaleF32)(sums, n, scale_a, scale_b, accumulate, to);
}
void ScaleSums(const float* sums, std::int64_t n, float scale_a, float scale_b, bool accumulate,
               bf16* to) {
  HWY_DYNAMIC_DISPATCH(ScaleBF16)(sums, n, scale_a, scale_b, accumulate, to);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
