// Vector kernels of SwiGLU, compiled once for each instruction set.
#include "cistron/ops/activation/swiglu_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/activation/swiglu_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::StoreFloat;

// How far ahead of their use lines are asked for, in elements: the streams are too many, and a row
// of each too short, for the hardware to see them coming.
constexpr std::int64_t kAhead = 768;

template <class T>
HWY_INLINE void PrefetchRead(const T* p) {
  __builtin_prefetch(p + kAhead, 0);
}
template <class T>
HWY_INLINE void PrefetchWrite(const T* p) {
  __builtin_prefetch(p + kAhead, 1);
}

// e^x for x ≤ 0 within 2 units of u = 2^-24 (relative); 0 below −87.3, where e^x < 2^-125, and for
// NaN. x = n·ln 2 + r, |r| ≤ ln 2 / 2, with ln 2 in two parts, the product of n and the first
// exact; e^r = 1 + r + r²·q(r) with q the minimax polynomial in relative error (4e-9).
HWY_INLINE FloatVec ExpOfNegative(FloatVec x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  // Adding 1.5·2^23 rounds to an integer, which is then in the low bits.
  const FloatVec magic = hn::Set(d, 12582912.0f);
  const FloatVec t = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const FloatVec n = hn::Sub(t, magic);
  FloatVec r = hn::MulAdd(n, hn::Set(d, -0.693145751953125f), x);
  r = hn::MulAdd(n, hn::Set(d, -1.42860677e-6f), r);
  FloatVec q = hn::Set(d, 0.0013814580161124468f);
  q = hn::MulAdd(q, r, hn::Set(d, 0.008368724025785923f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.04166838899254799f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.1666652113199234f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.4999999403953552f));
  const FloatVec p = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, t));
  const FloatVec e = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, -87.3f)), e);
}

// With e = exp(−|a|) ≤ 1: σ(a) = 1 / (1 + e) or e / (1 + e). Nothing overflows, and σ is accurate
// on both sides. σ(NaN) is 1: whoever multiplies by a keeps the NaN.
HWY_INLINE FloatVec Sigmoid(FloatVec a) {
  const FloatTag d;
  const FloatVec e = ExpOfNegative(hn::Or(a, hn::Set(d, -0.0f)));
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
      PrefetchRead(gate + j);
      PrefetchRead(up + j);
      PrefetchWrite(y + j);
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
      PrefetchRead(gate + j);
      PrefetchRead(up + j);
      PrefetchRead(dy + j);
      PrefetchWrite(dgate + j);
      PrefetchWrite(dup + j);
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
