// Vector kernels of SwiGLU, compiled once for each instruction set.
#include "cistron/ops/activation/swiglu_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/activation/swiglu_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"
#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::ExpOfNonPositive;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::StoreFloat;

// With e = exp(−|a|) ≤ 1: σ(a) = 1 / (1 + e) or e / (1 + e). Nothing overflows, and σ is accurate
// on both sides.
HWY_INLINE FloatVec Sigmoid(FloatVec a) {
  const FloatTag d;
  const FloatVec e = ExpOfNonPositive(hn::Neg(hn::Abs(a)));
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec numerator = hn::IfThenElse(hn::Lt(a, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

template <class T>
HWY_INLINE void Store(FloatVec value, bool accumulate, T* to) {
  StoreFloat(accumulate ? hn::Add(LoadFloat(to), value) : value, to);
}

// Columns beyond the last whole vector go through buffers of one vector, padded with zeros.
template <class T>
struct Tail {
  HWY_ALIGN T values[kLanes] = {};
  Tail() = default;
  Tail(const T* from, std::int64_t n) {
    for (std::int64_t j = 0; j < n; ++j) values[j] = from[j];
  }
  void CopyTo(T* to, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) to[j] = values[j];
  }
};

template <class T>
HWY_INLINE void ForwardVector(const T* gate, const T* up, FloatVec scale, bool accumulate, T* y) {
  const FloatVec a = LoadFloat(gate);
  const FloatVec silu = hn::Mul(a, Sigmoid(a));
  Store(hn::Mul(hn::Mul(silu, LoadFloat(up)), scale), accumulate, y);
}

template <class T>
void ForwardRows(const SwiGluForwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* gate = args.x + row * args.x_stride;
    const T* up = gate + args.width;
    T* y = args.y + row * args.y_stride;
    const FloatVec scale =
        hn::Set(FloatTag(), args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    std::int64_t j = 0;
    for (; j + kLanes <= args.width; j += kLanes) {
      ForwardVector(gate + j, up + j, scale, args.accumulate, y + j);
    }
    if (const std::int64_t n = args.width - j; n > 0) {
      const Tail<T> gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> y_tail(y + j, args.accumulate ? n : 0);
      ForwardVector(gate_tail.values, up_tail.values, scale, args.accumulate, y_tail.values);
      y_tail.CopyTo(y + j, n);
    }
  }
}

// Returns this vector's summands of dscale.
template <class T>
HWY_INLINE FloatVec BackwardVector(const SwiGluBackwardArgs<T>& args, const T* dy, const T* gate,
                                   const T* up, FloatVec scale, T* dgate, T* dup, T* y) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec a = LoadFloat(gate), b = LoadFloat(up), dout = LoadFloat(dy);
  const FloatVec sigma = Sigmoid(a);
  const FloatVec silu = hn::Mul(a, sigma);
  const FloatVec scaled = hn::Mul(dout, scale);
  const FloatVec slope = hn::MulAdd(a, hn::Sub(one, sigma), one);
  const FloatVec silu_b = hn::Mul(silu, b);
  Store(hn::Mul(hn::Mul(scaled, b), hn::Mul(sigma, slope)), args.accumulate_dx, dgate);
  Store(hn::Mul(scaled, silu), args.accumulate_dx, dup);
  if (y != nullptr) Store(hn::Mul(silu_b, scale), args.accumulate_y, y);
  return hn::Mul(dout, silu_b);
}

template <class T>
void BackwardRows(const SwiGluBackwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const FloatTag d;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* dy = args.dy + row * args.dy_stride;
    const T* gate = args.x + row * args.x_stride;
    const T* up = gate + args.width;
    T* dgate = args.dx + row * args.dx_stride;
    T* dup = dgate + args.width;
    T* y = args.y == nullptr ? nullptr : args.y + row * args.y_stride;
    const FloatVec scale = hn::Set(d, args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    FloatVec dscale = hn::Zero(d);
    std::int64_t j = 0;
    for (; j + kLanes <= args.width; j += kLanes) {
      dscale = hn::Add(dscale, BackwardVector(args, dy + j, gate + j, up + j, scale, dgate + j,
                                              dup + j, y == nullptr ? nullptr : y + j));
    }
    if (const std::int64_t n = args.width - j; n > 0) {
      const Tail<T> dy_tail(dy + j, n), gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> dgate_tail(dgate + j, args.accumulate_dx ? n : 0);
      Tail<T> dup_tail(dup + j, args.accumulate_dx ? n : 0);
      Tail<T> y_tail(y + j, y != nullptr && args.accumulate_y ? n : 0);
      // Padding has dy = up = 0 and adds nothing.
      dscale =
          hn::Add(dscale, BackwardVector(args, dy_tail.values, gate_tail.values, up_tail.values,
                                         scale, dgate_tail.values, dup_tail.values, y_tail.values));
      dgate_tail.CopyTo(dgate + j, n);
      dup_tail.CopyTo(dup + j, n);
      if (y != nullptr) y_tail.CopyTo(y + j, n);
    }
    if (args.dscale != nullptr) {
      const float sum = hn::GetLane(hn::SumOfLanes(d, dscale));
      args.dscale[row] = args.accumulate_dscale ? args.dscale[row] + sum : sum;
    }
  }
}

void ForwardF32(const SwiGluForwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  ForwardRows(args, begin, end);
}
void ForwardBF16(const SwiGluForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  ForwardRows(args, begin, end);
}
void BackwardF32(const SwiGluBackwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  BackwardRows(args, begin, end);
}
void BackwardBF16(const SwiGluBackwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  BackwardRows(args, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardBF16);
HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);

}  // namespace

void SwiGluForwardRows(const SwiGluForwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(args, begin, end);
}
void SwiGluForwardRows(const SwiGluForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(args, begin, end);
}
void SwiGluBackwardRows(const SwiGluBackwardArgs<float>& args, std::int64_t begin,
                        std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(args, begin, end);
}
void SwiGluBackwardRows(const SwiGluBackwardArgs<bf16>& args, std::int64_t begin,
                        std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(args, begin, end);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
