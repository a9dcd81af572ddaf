// Vector kernels of rope, compiled once for each instruction set.
#include "cistron/ops/rope/rope_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/rope/rope_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

template <class T>
void Rows(const RopeArgs<T>& a, std::int64_t begin, std::int64_t end, float* scratch) {
  const FloatTag d;
  const std::int64_t half = a.head_dim / 2;
  float* cosines = scratch;
  float* sines = scratch + half;
  for (std::int64_t t = begin; t < end; ++t) {
    // Apart, once for all heads of the token.
    const float* angles = a.table + a.positions[t] * a.head_dim;
    for (std::int64_t i = 0; i < half; ++i) {
      cosines[i] = angles[2 * i];
      sines[i] = a.sign * angles[2 * i + 1];
    }
    T* row = a.x + t * a.x_stride;
    for (T* low = row; low < row + a.width; low += a.head_dim) {
      T* high = low + half;
      std::int64_t i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const FloatVec cosine = hn::LoadU(d, cosines + i), sine = hn::LoadU(d, sines + i);
        const FloatVec x = LoadFloat(low + i), y = LoadFloat(high + i);
        // Two products and a sum, as in the reference: the same bits on every machine.
        StoreFloat(hn::Sub(hn::Mul(x, cosine), hn::Mul(y, sine)), low + i);
        StoreFloat(hn::Add(hn::Mul(y, cosine), hn::Mul(x, sine)), high + i);
      }
      for (; i < half; ++i) {
        const float x = static_cast<float>(low[i]), y = static_cast<float>(high[i]);
        low[i] = T(x * cosines[i] - y * sines[i]);
        high[i] = T(y * cosines[i] + x * sines[i]);
      }
    }
  }
}

void RowsF32(const RopeArgs<float>& args, std::int64_t begin, std::int64_t end, float* scratch) {
  Rows(args, begin, end, scratch);
}
void RowsBF16(const RopeArgs<bf16>& args, std::int64_t begin, std::int64_t end, float* scratch) {
  Rows(args, begin, end, scratch);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(RowsF32);
HWY_EXPORT(RowsBF16);

}  // namespace

void RopeRows(const RopeArgs<float>& args, std::int64_t begin, std::int64_t end, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RowsF32)(args, begin, end, scratch);
}
void RopeRows(const RopeArgs<bf16>& args, std::int64_t begin, std::int64_t end, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RowsBF16)(args, begin, end, scratch);
}

}  // namespace cistron::ops
#endif  // HWY_ONCE
