// Vector kernels of the scaled activations, compiled once for each instruction set.
#include "cistron/ops/activation/scaled_activation_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/activation/scaled_activation_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::ClampKeepingNaN;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::ForEach;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloats;
using ops::HWY_NAMESPACE::Sigmoid;
using ops::HWY_NAMESPACE::StoreFloats;

// A block: two vectors, 32 elements with AVX-512, so that the usual interleave of 32 has no tail.
constexpr int kVectors = 2;
constexpr std::int64_t kBlock = kVectors * kLanes;

// From here on σ is 0 or 1 in f32; GELU's argument has z = ±123 there.
constexpr float kSaturated = 120.0f, kGeluSaturated = 11.5f;

// G and U of a block and, with kSlopes, G' and U' (see scaled_activation.h).
struct Block {
  FloatVec gate[kVectors], gate_slope[kVectors], up[kVectors], up_slope[kVectors];
};

template <ActivationKind kKind, bool kSlopes>
HWY_INLINE void Evaluate(const ActivationConfig& config, const FloatVec (&a)[kVectors],
                         const FloatVec (&b)[kVectors], Block& v) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  if constexpr (kKind == ActivationKind::kSRelu) {
    ForEach<kVectors>([&](int i) {
      const FloatVec r = hn::IfThenElse(hn::Lt(a[i], zero), zero, a[i]);  // keeps NaN
      v.gate[i] = hn::Mul(r, r);
      v.up[i] = one;
      if constexpr (kSlopes) v.gate_slope[i] = hn::Add(r, r);
    });
    return;
  }
  const float limit = static_cast<float>(config.limit);
  FloatVec x[kVectors], z[kVectors], az_slope[kVectors], sigma[kVectors];
  ForEach<kVectors>([&](int i) {
    if constexpr (kKind == ActivationKind::kSwiGlu) {
      x[i] = z[i] = az_slope[i] = a[i];
      v.up[i] = b[i];
    } else if constexpr (kKind == ActivationKind::kClampedSwiGlu) {
      x[i] = hn::IfThenElse(hn::Gt(a[i], hn::Set(d, limit)), hn::Set(d, limit), a[i]);
      const FloatVec product = hn::Mul(hn::Set(d, static_cast<float>(config.alpha)), x[i]);
      const FloatVec low = hn::Set(d, -kSaturated);
      z[i] = az_slope[i] = hn::IfThenElse(hn::Lt(product, low), low, product);
      v.up[i] = hn::Add(ClampKeepingNaN(b[i], -limit, limit), one);
    } else {
      const FloatVec scale = hn::Set(d, 1.5957691216057308f);  // 2·√(2/π)
      x[i] = a[i];
      const FloatVec c = ClampKeepingNaN(a[i], -kGeluSaturated, kGeluSaturated);
      const FloatVec square = hn::Mul(c, c), scaled = hn::Mul(scale, c);
      z[i] = hn::Mul(scaled, hn::MulAdd(hn::Set(d, 0.044715f), square, one));
      az_slope[i] = hn::Mul(scaled, hn::MulAdd(hn::Set(d, 3 * 0.044715f), square, one));
      v.up[i] = b[i];
    }
  });
  Sigmoid(z, sigma);
  ForEach<kVectors>([&](int i) {
    v.gate[i] = hn::Mul(x[i], sigma[i]);
    if constexpr (kSlopes) {
      const FloatVec slope = hn::MulAdd(az_slope[i], hn::Sub(one, sigma[i]), one);
      v.gate_slope[i] = hn::Mul(sigma[i], slope);
      v.up_slope[i] = one;
      if constexpr (kKind == ActivationKind::kClampedSwiGlu) {
        const FloatVec bound = hn::Set(d, limit);
        v.gate_slope[i] = hn::IfThenElse(hn::Gt(a[i], bound), zero, v.gate_slope[i]);
        v.up_slope[i] = hn::IfThenElse(hn::Gt(hn::Abs(b[i]), bound), zero, one);
      }
    }
  });
}

template <class T>
using Tail = ops::HWY_NAMESPACE::Tail<T, kBlock>;

template <ActivationKind kKind, class T>
HWY_INLINE void ForwardBlock(const ScaledActivationArgs<T>& args, const T* gate, const T* up,
                             FloatVec scale, T* y) {
  FloatVec a[kVectors], b[kVectors], out[kVectors];
  LoadFloats(gate, a);
  LoadFloats(up, b);
  Block v;
  Evaluate<kKind, false>(args.config, a, b, v);
  ForEach<kVectors>([&](int i) { out[i] = hn::Mul(hn::Mul(v.gate[i], v.up[i]), scale); });
  StoreFloats(out, args.accumulate_y, y);
}

template <ActivationKind kKind, class T>
void ForwardRows(const ScaledActivationArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t stride = args.up_distance > 0 && args.segment < args.width
                                  ? 2 * args.segment
                                  : args.segment;  // from a segment of x to the next
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = args.x + row * args.x_stride;
    T* y = args.y + row * args.y_stride;
    const FloatVec scale =
        hn::Set(FloatTag(), args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    for (std::int64_t s = 0; s < args.width; s += args.segment, x += stride, y += args.segment) {
      const T* up = x + args.up_distance;
      std::int64_t j = 0;
      for (; j + kBlock <= args.segment; j += kBlock) {
        ForwardBlock<kKind>(args, x + j, up + j, scale, y + j);
      }
      if (const std::int64_t n = args.segment - j; n > 0) {
        const Tail<T> a(x + j, n), b(up + j, n);
        Tail<T> out(y + j, args.accumulate_y ? n : 0);
        ForwardBlock<kKind>(args, a.values, b.values, scale, out.values);
        out.CopyTo(y + j, n);
      }
    }
  }
}

template <ActivationKind kKind, class T>
HWY_INLINE void BackwardBlock(const ScaledActivationArgs<T>& args, const T* dy, const T* gate,
                              const T* up, FloatVec scale, T* dgate, T* dup, T* y,
                              FloatVec& dscale) {
  FloatVec a[kVectors], b[kVectors], dout[kVectors], out[kVectors];
  LoadFloats(gate, a);
  LoadFloats(up, b);
  LoadFloats(dy, dout);
  Block v;
  Evaluate<kKind, true>(args.config, a, b, v);
  if constexpr (IsGated(kKind)) {
    ForEach<kVectors>([&](int i) {
      out[i] = hn::Mul(hn::Mul(dout[i], scale), hn::Mul(v.gate[i], v.up_slope[i]));
    });
    StoreFloats(out, args.accumulate_dx, dup);
  }
  ForEach<kVectors>(
      [&](int i) { out[i] = hn::Mul(hn::Mul(hn::Mul(dout[i], scale), v.up[i]), v.gate_slope[i]); });
  StoreFloats(out, args.accumulate_dx, dgate);
  ForEach<kVectors>([&](int i) { v.gate[i] = hn::Mul(v.gate[i], v.up[i]); });
  if (y != nullptr) {
    ForEach<kVectors>([&](int i) { out[i] = hn::Mul(v.gate[i], scale); });
    StoreFloats(out, args.accumulate_y, y);
  }
  ForEach<kVectors>([&](int i) { dscale = hn::Add(dscale, hn::Mul(dout[i], v.gate[i])); });
}

template <ActivationKind kKind, class T>
void BackwardRows(const ScaledActivationArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const FloatTag d;
  const std::int64_t stride =
      args.up_distance > 0 && args.segment < args.width ? 2 * args.segment : args.segment;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = args.x + row * args.x_stride;
    const T* dy = args.dy + row * args.dy_stride;
    T* dx = args.dx + row * args.dx_stride;
    T* y = args.y == nullptr ? nullptr : args.y + row * args.y_stride;
    const FloatVec scale = hn::Set(d, args.row_scale == nullptr ? 1.0f : args.row_scale[row]);
    FloatVec dscale = hn::Zero(d);
    for (std::int64_t s = 0; s < args.width; s += args.segment, x += stride, dx += stride) {
      const T* up = x + args.up_distance;
      T* dup = dx + args.up_distance;
      std::int64_t j = 0;
      for (; j + kBlock <= args.segment; j += kBlock) {
        BackwardBlock<kKind>(args, dy + s + j, x + j, up + j, scale, dx + j, dup + j,
                             y == nullptr ? nullptr : y + s + j, dscale);
      }
      if (const std::int64_t n = args.segment - j; n > 0) {
        const Tail<T> dy_tail(dy + s + j, n), gate(x + j, n), up_tail(up + j, n);
        const std::int64_t before = args.accumulate_dx ? n : 0;
        Tail<T> dgate_tail(dx + j, before), dup_tail(dup + j, before);
        Tail<T> y_tail(y == nullptr ? nullptr : y + s + j,
                       y != nullptr && args.accumulate_y ? n : 0);
        // Padding has dy = 0 and adds nothing.
        BackwardBlock<kKind>(args, dy_tail.values, gate.values, up_tail.values, scale,
                             dgate_tail.values, dup_tail.values, y_tail.values, dscale);
        dgate_tail.CopyTo(dx + j, n);
        if constexpr (IsGated(kKind)) dup_tail.CopyTo(dup + j, n);
        if (y != nullptr) y_tail.CopyTo(y + s + j, n);
      }
    }
    if (args.dscale != nullptr) {
      const float sum = hn::GetLane(hn::SumOfLanes(d, dscale));
      args.dscale[row] = args.accumulate_dscale ? args.dscale[row] + sum : sum;
    }
  }
}

template <class T>
void Forward(const ScaledActivationArgs<T>& args, std::int64_t begin, std::int64_t end) {
  switch (args.config.kind) {
    case ActivationKind::kSwiGlu: return ForwardRows<ActivationKind::kSwiGlu>(args, begin, end);
    case ActivationKind::kClampedSwiGlu:
      return ForwardRows<ActivationKind::kClampedSwiGlu>(args, begin, end);
    case ActivationKind::kGeGlu: return ForwardRows<ActivationKind::kGeGlu>(args, begin, end);
    case ActivationKind::kSRelu: return ForwardRows<ActivationKind::kSRelu>(args, begin, end);
  }
}
template <class T>
void Backward(const ScaledActivationArgs<T>& args, std::int64_t begin, std::int64_t end) {
  switch (args.config.kind) {
    case ActivationKind::kSwiGlu: return BackwardRows<ActivationKind::kSwiGlu>(args, begin, end);
    case ActivationKind::kClampedSwiGlu:
      return BackwardRows<ActivationKind::kClampedSwiGlu>(args, begin, end);
    case ActivationKind::kGeGlu: return BackwardRows<ActivationKind::kGeGlu>(args, begin, end);
    case ActivationKind::kSRelu: return BackwardRows<ActivationKind::kSRelu>(args, begin, end);
  }
}

void ActivationForwardF32(const ScaledActivationArgs<float>& args, std::int64_t begin,
                          std::int64_t end) {
  Forward(args, begin, end);
}
void ActivationForwardBF16(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                           std::int64_t end) {
  Forward(args, begin, end);
}
void ActivationBackwardF32(const ScaledActivationArgs<float>& args, std::int64_t begin,
                           std::int64_t end) {
  Backward(args, begin, end);
}
void ActivationBackwardBF16(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                            std::int64_t end) {
  Backward(args, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(ActivationForwardF32);
HWY_EXPORT(ActivationForwardBF16);
HWY_EXPORT(ActivationBackwardF32);
HWY_EXPORT(ActivationBackwardBF16);

}  // namespace

void ActivationForwardRows(const ScaledActivationArgs<float>& args, std::int64_t begin,
                           std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ActivationForwardF32)(args, begin, end);
}
void ActivationForwardRows(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                           std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ActivationForwardBF16)(args, begin, end);
}
void ActivationBackwardRows(const ScaledActivationArgs<float>& args, std::int64_t begin,
                            std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ActivationBackwardF32)(args, begin, end);
}
void ActivationBackwardRows(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                            std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(ActivationBackwardBF16)(args, begin, end);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
