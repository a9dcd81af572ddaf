// Vector kernels of SwiGLU, compiled once for each instruction set.
#include "cistron/ops/activation/swiglu_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/activation/swiglu_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::Exp;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::ForEach;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloats;
using ops::HWY_NAMESPACE::StoreFloats;

// A block: as many vectors as take every step together.
constexpr int kVectors = 4;
constexpr std::int64_t kBlock = kVectors * kLanes;

// How far ahead of their use inputs are asked for, in bytes: the streams are too many, and a row of
// each too short, for the hardware to see them coming. Outputs are not: asking for a line to write
// takes a place among the outstanding reads, and stores wait in a buffer anyway.
constexpr std::int64_t kAhead = 8192;
constexpr std::int64_t kLine = 64;

// Asks for the lines of a block that lies kAhead further on.
template <class T>
HWY_INLINE void PrefetchBlock(const T* p) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T)) * kBlock;
  const char* line = reinterpret_cast<const char*>(p) + kAhead;
  for (std::int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(line + i);
}

// σ(a) = 1 / (1 + e^−a), accurate on both sides; e^−a overflows to Inf below −88.4, where σ(a) is 0
// but for 2^-127. σ(NaN) is NaN.
HWY_INLINE void Sigmoid(const FloatVec (&a)[kVectors], FloatVec (&sigma)[kVectors]) {
  const FloatVec one = hn::Set(FloatTag(), 1.0f);
  ForEach<kVectors>([&](int i) { sigma[i] = hn::Neg(a[i]); });
  Exp(sigma);
  ForEach<kVectors>([&](int i) { sigma[i] = hn::Div(one, hn::Add(one, sigma[i])); });
}

// Columns beyond the last whole block go through buffers of one block, padded with zeros.
template <class T>
struct Tail {
  HWY_ALIGN T values[kBlock] = {};
  Tail() = default;
  Tail(const T* from, std::int64_t n) {
    for (std::int64_t j = 0; j < n; ++j) values[j] = from[j];
  }
  void CopyTo(T* to, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) to[j] = values[j];
  }
};

template <class T>
HWY_INLINE void ForwardBlock(const T* gate, const T* up, FloatVec scale, bool accumulate, T* y) {
  FloatVec a[kVectors], b[kVectors], out[kVectors];
  LoadFloats(gate, a);
  Sigmoid(a, out);
  LoadFloats(up, b);
  ForEach<kVectors>([&](int i) {
    const FloatVec silu = hn::Mul(a[i], out[i]);
    out[i] = hn::Mul(hn::Mul(silu, b[i]), scale);
  });
  StoreFloats(out, accumulate, y);
}

template <class T>
void ForwardRows(const SwiGluForwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = args.width;
  const bool accumulate = args.accumulate;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* gate = args.x + row * args.x_stride;
    const T* up = gate + width;
    T* y = args.y + row * args.y_stride;
    const FloatVec scale =
        hn::Set(FloatTag(), args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    std::int64_t j = 0;
    for (; j + kBlock <= width; j += kBlock) {
      PrefetchBlock(gate + j);
      PrefetchBlock(up + j);
      ForwardBlock(gate + j, up + j, scale, accumulate, y + j);
    }
    if (const std::int64_t n = width - j; n > 0) {
      const Tail<T> gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> y_tail(y + j, accumulate ? n : 0);
      ForwardBlock(gate_tail.values, up_tail.values, scale, accumulate, y_tail.values);
      y_tail.CopyTo(y + j, n);
    }
  }
}

// Adds this block's summands of dscale to `dscale`.
template <class T>
HWY_INLINE void BackwardBlock(const SwiGluBackwardArgs<T>& args, const T* dy, const T* gate,
                              const T* up, FloatVec scale, T* dgate, T* dup, T* y,
                              FloatVec& dscale) {
  const FloatVec one = hn::Set(FloatTag(), 1.0f);
  FloatVec a[kVectors], b[kVectors], dout[kVectors], sigma[kVectors], silu[kVectors];
  LoadFloats(gate, a);
  Sigmoid(a, sigma);
  LoadFloats(up, b);
  LoadFloats(dy, dout);
  FloatVec out[kVectors];
  ForEach<kVectors>([&](int i) {
    silu[i] = hn::Mul(a[i], sigma[i]);
    out[i] = hn::Mul(hn::Mul(dout[i], scale), silu[i]);
  });
  StoreFloats(out, args.accumulate_dx, dup);
  ForEach<kVectors>([&](int i) {
    const FloatVec slope = hn::MulAdd(a[i], hn::Sub(one, sigma[i]), one);
    out[i] = hn::Mul(hn::Mul(hn::Mul(dout[i], scale), b[i]), hn::Mul(sigma[i], slope));
  });
  StoreFloats(out, args.accumulate_dx, dgate);
  ForEach<kVectors>([&](int i) { silu[i] = hn::Mul(silu[i], b[i]); });
  if (y != nullptr) {
    ForEach<kVectors>([&](int i) { out[i] = hn::Mul(silu[i], scale); });
    StoreFloats(out, args.accumulate_y, y);
  }
  ForEach<kVectors>([&](int i) { dscale = hn::Add(dscale, hn::Mul(dout[i], silu[i])); });
}

template <class T>
void BackwardRows(const SwiGluBackwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const FloatTag d;
  const std::int64_t width = args.width;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* dy = args.dy + row * args.dy_stride;
    const T* gate = args.x + row * args.x_stride;
    const T* up = gate + width;
    T* dgate = args.dx + row * args.dx_stride;
    T* dup = dgate + width;
    T* y = args.y == nullptr ? nullptr : args.y + row * args.y_stride;
    const FloatVec scale = hn::Set(d, args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    FloatVec dscale = hn::Zero(d);
    std::int64_t j = 0;
    for (; j + kBlock <= width; j += kBlock) {
      PrefetchBlock(gate + j);
      PrefetchBlock(up + j);
      PrefetchBlock(dy + j);
      BackwardBlock(args, dy + j, gate + j, up + j, scale, dgate + j, dup + j,
                    y == nullptr ? nullptr : y + j, dscale);
    }
    if (const std::int64_t n = width - j; n > 0) {
      const Tail<T> dy_tail(dy + j, n), gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> dgate_tail(dgate + j, args.accumulate_dx ? n : 0);
      Tail<T> dup_tail(dup + j, args.accumulate_dx ? n : 0);
      Tail<T> y_tail(y + j, y != nullptr && args.accumulate_y ? n : 0);
      // Padding has dy = up = 0 and adds nothing.
      BackwardBlock(args, dy_tail.values, gate_tail.values, up_tail.values, scale,
                    dgate_tail.values, dup_tail.values, y_tail.values, dscale);
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
