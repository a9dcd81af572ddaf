// Vector kernels of SwiGLU, compiled once for each instruction set.
#include "cistron/ops/activation/swiglu_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/activation/swiglu_rows_cpu.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::ForEach;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloats;
using ops::HWY_NAMESPACE::Sigmoid;
using ops::HWY_NAMESPACE::StoreFloats;
using ops::HWY_NAMESPACE::StreamFloats;

// A block: as many vectors as take every step together.
constexpr int kVectors = 4;
constexpr std::int64_t kBlock = kVectors * kLanes;

// How far ahead of their use inputs are asked for, in bytes: the streams are too many, and a row of
// each too short, for the hardware to see them coming. They are asked for into the second level:
// the first has too few places for outstanding lines (on Zen 4 twice as slow). Outputs are not
// asked for: they would take such places too, and stores wait in a buffer anyway.
constexpr std::int64_t kAhead = 16384;
constexpr std::int64_t kLine = 64;
constexpr int kSecondLevel = 2;

// Asks for the lines of a block that lies kAhead further on.
template <class T>
HWY_INLINE void PrefetchBlock(const T* p) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T)) * kBlock;
  const char* line = reinterpret_cast<const char*>(p) + kAhead;
  for (std::int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(line + i, 0, kSecondLevel);
}

template <class T>
using Tail = ops::HWY_NAMESPACE::Tail<T, kBlock>;

template <class T>
HWY_INLINE void ForwardBlock(const T* gate, const T* up, FloatVec scale, FloatVec (&y)[kVectors]) {
  FloatVec a[kVectors], b[kVectors];
  LoadFloats(gate, a);
  Sigmoid(a, y);
  LoadFloats(up, b);
  ForEach<kVectors>([&](int i) {
    const FloatVec silu = hn::Mul(a[i], y[i]);
    y[i] = hn::Mul(hn::Mul(silu, b[i]), scale);
  });
}

// Whether rows of `stride` elements can be written in whole lines from aligned vectors.
bool WholeLines(const float* p, std::int64_t stride) {
  constexpr std::int64_t kFloats = kLine / static_cast<std::int64_t>(sizeof(float));
  return kBlock % kFloats == 0 && reinterpret_cast<std::uintptr_t>(p) % kLine == 0 &&
         stride % kFloats == 0;
}
bool CanStream(const SwiGluForwardArgs<float>& args) {
  return args.past_caches && !args.accumulate && WholeLines(args.y, args.y_stride);
}
bool CanStream(const SwiGluBackwardArgs<float>& args) {
  return args.past_caches && !args.accumulate_dx && WholeLines(args.dx, args.dx_stride) &&
         WholeLines(args.dx, args.width) &&
         (args.y == nullptr || (!args.accumulate_y && WholeLines(args.y, args.y_stride)));
}

template <bool kStream, class T>
HWY_INLINE void Store(FloatVec (&v)[kVectors], bool accumulate, T* to) {
  if constexpr (kStream) {
    StreamFloats(v, to);
  } else {
    StoreFloats(v, accumulate, to);
  }
}

template <bool kStream, class T>
void ForwardRows(const SwiGluForwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = args.width;
  const bool accumulate = args.accumulate;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* gate = args.x + row * args.x_stride;
    const T* up = gate + width;
    T* y = args.y + row * args.y_stride;
    const FloatVec scale =
        hn::Set(FloatTag(), args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    FloatVec block[kVectors];
    std::int64_t j = 0;
    for (; j + kBlock <= width; j += kBlock) {
      PrefetchBlock(gate + j);
      PrefetchBlock(up + j);
      ForwardBlock(gate + j, up + j, scale, block);
      Store<kStream>(block, accumulate, y + j);
    }
    if (const std::int64_t n = width - j; n > 0) {
      const Tail<T> gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> y_tail(y + j, accumulate ? n : 0);
      ForwardBlock(gate_tail.values, up_tail.values, scale, block);
      StoreFloats(block, accumulate, y_tail.values);
      y_tail.CopyTo(y + j, n);
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

// Adds this block's summands of dscale to `dscale`.
template <bool kStream, class T>
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
  Store<kStream>(out, args.accumulate_dx, dup);
  ForEach<kVectors>([&](int i) {
    const FloatVec slope = hn::MulAdd(a[i], hn::Sub(one, sigma[i]), one);
    out[i] = hn::Mul(hn::Mul(hn::Mul(dout[i], scale), b[i]), hn::Mul(sigma[i], slope));
  });
  Store<kStream>(out, args.accumulate_dx, dgate);
  ForEach<kVectors>([&](int i) { silu[i] = hn::Mul(silu[i], b[i]); });
  if (y != nullptr) {
    ForEach<kVectors>([&](int i) { out[i] = hn::Mul(silu[i], scale); });
    Store<kStream>(out, args.accumulate_y, y);
  }
  ForEach<kVectors>([&](int i) { dscale = hn::Add(dscale, hn::Mul(dout[i], silu[i])); });
}

template <bool kStream, class T>
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
      BackwardBlock<kStream>(args, dy + j, gate + j, up + j, scale, dgate + j, dup + j,
                             y == nullptr ? nullptr : y + j, dscale);
    }
    if (const std::int64_t n = width - j; n > 0) {
      const Tail<T> dy_tail(dy + j, n), gate_tail(gate + j, n), up_tail(up + j, n);
      Tail<T> dgate_tail(dgate + j, args.accumulate_dx ? n : 0);
      Tail<T> dup_tail(dup + j, args.accumulate_dx ? n : 0);
      Tail<T> y_tail;
      if (y != nullptr && args.accumulate_y) y_tail = Tail<T>(y + j, n);
      // Padding has dy = up = 0 and adds nothing.
      BackwardBlock<false>(args, dy_tail.values, gate_tail.values, up_tail.values, scale,
                           dgate_tail.values, dup_tail.values,
                           y == nullptr ? nullptr : y_tail.values, dscale);
      dgate_tail.CopyTo(dgate + j, n);
      dup_tail.CopyTo(dup + j, n);
      if (y != nullptr) y_tail.CopyTo(y + j, n);
    }
    if (args.dscale != nullptr) {
      const float sum = hn::GetLane(hn::SumOfLanes(d, dscale));
      args.dscale[row] = args.accumulate_dscale ? args.dscale[row] + sum : sum;
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

void ForwardF32(const SwiGluForwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  if (CanStream(args)) {
    ForwardRows<true>(args, begin, end);
  } else {
    ForwardRows<false>(args, begin, end);
  }
}
void ForwardBF16(const SwiGluForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  ForwardRows<false>(args, begin, end);
}
void BackwardF32(const SwiGluBackwardArgs<float>& args, std::int64_t begin, std::int64_t end) {
  if (CanStream(args)) {
    BackwardRows<true>(args, begin, end);
  } else {
    BackwardRows<false>(args, begin, end);
  }
}
void BackwardBF16(const SwiGluBackwardArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  BackwardRows<false>(args, begin, end);
}

}  // namespace
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
