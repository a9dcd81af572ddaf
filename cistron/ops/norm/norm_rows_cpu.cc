// Vector kernels of RMSNorm, compiled once for each instruction set.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cistron/ops/norm/norm_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/norm/norm_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

template <class T>
HWY_INLINE void Store(float value, bool accumulate, T* to) {
  *to = T(accumulate ? static_cast<float>(*to) + value : value);
}
template <class T>
HWY_INLINE void Store(FloatVec value, bool accumulate, T* to) {
  StoreFloat(accumulate ? hn::Add(LoadFloat(to), value) : value, to);
}

template <class T>
void ForwardRows(const RmsNormForwardArgs<T>& a, std::int64_t begin, std::int64_t end) {
  const FloatTag d;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = a.x + row * a.x_stride;
    T* h = a.h == nullptr ? nullptr : a.h + row * a.h_stride;
    // Two sums hide half of an addition's latency; their order is fixed.
    FloatVec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
    float tail = 0;
    std::int64_t j = 0;
    if (a.residual != nullptr) {
      const T* residual = a.residual + row * a.residual_stride;
      for (; j + kLanes <= a.width; j += kLanes) {
        StoreFloat(hn::Add(LoadFloat(x + j), LoadFloat(residual + j)), h + j);
        const FloatVec v = LoadFloat(h + j);  // as rounded
        sum1 = hn::MulAdd(v, v, sum1);
        std::swap(sum0, sum1);
      }
      for (; j < a.width; ++j) {
        h[j] = T(static_cast<float>(x[j]) + static_cast<float>(residual[j]));
        tail += static_cast<float>(h[j]) * static_cast<float>(h[j]);
      }
      x = h;
    } else {
      for (; j + kLanes <= a.width; j += kLanes) {
        const FloatVec v = LoadFloat(x + j);
        sum1 = hn::MulAdd(v, v, sum1);
        std::swap(sum0, sum1);
      }
      for (; j < a.width; ++j) tail += static_cast<float>(x[j]) * static_cast<float>(x[j]);
      if (h != nullptr && h != x) std::copy_n(x, a.width, h);
    }
    const float squares = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + tail;
    const float r = 1.0f / std::sqrt(squares / static_cast<float>(a.width) + a.eps);
    const FloatVec factor = hn::Set(d, r);
    T* y = a.y + row * a.y_stride;
    for (j = 0; j + kLanes <= a.width; j += kLanes) {
      const FloatVec v = hn::Mul(hn::Mul(LoadFloat(x + j), factor), LoadFloat(a.g + j));
      Store(v, a.accumulate, y + j);
    }
    for (; j < a.width; ++j) {
      Store(static_cast<float>(x[j]) * r * static_cast<float>(a.g[j]), a.accumulate, y + j);
    }
    if (a.rstd != nullptr) a.rstd[row] = r;
  }
}

template <class T>
void BackwardRows(const RmsNormBackwardArgs<T>& a, std::int64_t begin, std::int64_t end,
                  float* dg) {
  const FloatTag d;
  if (dg != nullptr) std::fill_n(dg, a.width, 0.0f);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* dy = a.dy + row * a.dy_stride;
    const T* h = a.h + row * a.h_stride;
    const T* dh_in = a.dh_in == nullptr ? nullptr : a.dh_in + row * a.dh_in_stride;
    T* dh = a.dh + row * a.dh_stride;
    const float r = a.rstd[row];
    FloatVec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
    float tail = 0;
    std::int64_t j = 0;
    for (; j + kLanes <= a.width; j += kLanes) {
      const FloatVec gdy = hn::Mul(LoadFloat(a.g + j), LoadFloat(dy + j));
      sum1 = hn::MulAdd(gdy, LoadFloat(h + j), sum1);
      std::swap(sum0, sum1);
    }
    for (; j < a.width; ++j) {
      tail += static_cast<float>(a.g[j]) * static_cast<float>(dy[j]) * static_cast<float>(h[j]);
    }
    const float dot = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + tail;
    const float mean = r * r * dot / static_cast<float>(a.width);
    const FloatVec factor = hn::Set(d, r), minus_mean = hn::Set(d, -mean);
    // dh may be written over dy or dh_in: everything of a column is read before its dh is stored.
    for (j = 0; j + kLanes <= a.width; j += kLanes) {
      const FloatVec dy_v = LoadFloat(dy + j), h_v = LoadFloat(h + j);
      FloatVec v = hn::Mul(factor, hn::MulAdd(h_v, minus_mean, hn::Mul(LoadFloat(a.g + j), dy_v)));
      if (dh_in != nullptr) v = hn::Add(v, LoadFloat(dh_in + j));
      if (dg != nullptr) {
        hn::StoreU(hn::MulAdd(dy_v, hn::Mul(h_v, factor), hn::LoadU(d, dg + j)), d, dg + j);
      }
      Store(v, a.accumulate, dh + j);
    }
    for (; j < a.width; ++j) {
      const float dy_v = static_cast<float>(dy[j]), h_v = static_cast<float>(h[j]);
      float v = r * (static_cast<float>(a.g[j]) * dy_v - h_v * mean);
      if (dh_in != nullptr) v += static_cast<float>(dh_in[j]);
      if (dg != nullptr) dg[j] += dy_v * (h_v * r);
      Store(v, a.accumulate, dh + j);
    }
  }
}

void ForwardF32(const RmsNormForwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  ForwardRows(args, begin, end);
}
void ForwardBF16(const RmsNormForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  ForwardRows(args, begin, end);
}
void BackwardF32(const RmsNormBackwardArgs<float>& args, std::int64_t begin, std::int64_t end,
                 float* dg) {
  BackwardRows(args, begin, end, dg);
}
void BackwardBF16(const RmsNormBackwardArgs<bf16>& args, std::int64_t begin, std::int64_t end,
                  float* dg) {
  BackwardRows(args, begin, end, dg);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardBF16);
HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);

}  // namespace

void RmsNormForwardRows(const RmsNormForwardArgs<float>& args, std::int64_t begin,
                        std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(args, begin, end);
}
void RmsNormForwardRows(const RmsNormForwardArgs<bf16>& args, std::int64_t begin,
                        std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(args, begin, end);
}
void RmsNormBackwardRows(const RmsNormBackwardArgs<float>& args, std::int64_t begin,
                         std::int64_t end, float* dg) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(args, begin, end, dg);
}
void RmsNormBackwardRows(const RmsNormBackwardArgs<bf16>& args, std::int64_t begin,
                         std::int64_t end, float* dg) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(args, begin, end, dg);
}

}  // namespace cistron::ops
#endif  // HWY_ONCE
