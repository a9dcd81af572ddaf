// Vector helpers of the tuned kernels, compiled once for each instruction set (Highway's "-inl"
// pattern: included after foreach_target.h, hence the unusual include guard).
#include <hwy/highway.h>

#include "cistron/base/float_types.h"

#if defined(CISTRON_OPS_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_VECTOR_INL_H_
#undef CISTRON_OPS_VECTOR_INL_H_
#else
#define CISTRON_OPS_VECTOR_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(FloatTag()));

// Loads kLanes elements as f32.
HWY_INLINE FloatVec LoadFloat(const float* from) {
  return hn::LoadU(FloatTag(), from);
}
HWY_INLINE FloatVec LoadFloat(const bf16* from) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

// Calls f(0), …, f(kCount − 1). Several vectors that take each step together keep a processor
// busier than one after another.
template <int kCount, class F>
HWY_INLINE void ForEach(F&& f) {
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) f(i);
}

// Bits of f32 rounded to the nearest bf16 (even), in the upper half of each lane; the lower half is
// not cleared. NaN stays NaN, as in bf16's constructor.
HWY_INLINE hn::Vec<hn::RebindToUnsigned<FloatTag>> RoundToUpperHalf(FloatVec v) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(u, hn::Set(du, 0x7fff)), odd);
  const auto quiet = hn::Or(u, hn::Set(du, 0x400000));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// Stores kLanes elements, bf16 rounded.
HWY_INLINE void StoreFloat(FloatVec v, float* to) {
  hn::StoreU(v, FloatTag(), to);
}
HWY_INLINE void StoreFloat(FloatVec v, bf16* to) {
  const auto bits = hn::ShiftRight<16>(RoundToUpperHalf(v));
#if HWY_TARGET == HWY_SCALAR
  to->bits = static_cast<std::uint16_t>(hn::GetLane(bits));
#else
  // Values are below 2^16, and the narrowing of signed integers with saturation is exact from
  // 32-bit values that fit; it exists for every target.
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::RebindToSigned<FloatTag> di;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, bits)), d16, reinterpret_cast<std::uint16_t*>(to));
#endif
}

// Loads and stores kCount·kLanes elements for work that is the same for every element: in which
// lane an element lies is the same for all arrays of one type, and otherwise not said. bf16 needs
// no shuffles this way: a vector of pairs falls into its even and its odd elements.
template <int kCount>
HWY_INLINE void LoadFloats(const float* from, FloatVec (&v)[kCount]) {
  ForEach<kCount>([&](int i) { v[i] = LoadFloat(from + i * kLanes); });
}
template <int kCount>
HWY_INLINE void StoreFloats(const FloatVec (&v)[kCount], float* to) {
  ForEach<kCount>([&](int i) { StoreFloat(v[i], to + i * kLanes); });
}
#if HWY_TARGET == HWY_SCALAR
template <int kCount>
HWY_INLINE void LoadFloats(const bf16* from, FloatVec (&v)[kCount]) {
  ForEach<kCount>([&](int i) { v[i] = LoadFloat(from + i); });
}
template <int kCount>
HWY_INLINE void StoreFloats(const FloatVec (&v)[kCount], bf16* to) {
  ForEach<kCount>([&](int i) { StoreFloat(v[i], to + i); });
}
#else
template <int kCount>
HWY_INLINE void LoadFloats(const bf16* from, FloatVec (&v)[kCount]) {
  static_assert(kCount % 2 == 0);
  const FloatTag d;
  const hn::Repartition<std::uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> du;
  ForEach<kCount / 2>([&](int i) {
    const auto pairs = hn::BitCast(
        du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from) + 2 * i * kLanes));
    v[2 * i] = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
    v[2 * i + 1] = hn::BitCast(d, hn::And(pairs, hn::Set(du, 0xffff0000u)));
  });
}
template <int kCount>
HWY_INLINE void StoreFloats(const FloatVec (&v)[kCount], bf16* to) {
  static_assert(kCount % 2 == 0);
  const hn::Repartition<std::uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> du;
  hn::Vec<hn::RebindToUnsigned<FloatTag>> bits[kCount];
  ForEach<kCount>([&](int i) { bits[i] = RoundToUpperHalf(v[i]); });
  ForEach<kCount / 2>([&](int i) {
    const auto even = hn::ShiftRight<16>(bits[2 * i]);
    const auto pairs = hn::IfVecThenElse(hn::Set(du, 0xffff0000u), bits[2 * i + 1], even);
    hn::StoreU(hn::BitCast(d16, pairs), d16, reinterpret_cast<std::uint16_t*>(to) + 2 * i * kLanes);
  });
}
#endif
// The same past the caches, for what is not read before it would have left them. `to` is aligned to
// a vector; hwy::FlushStream() must follow before other threads read.
template <int kCount>
HWY_INLINE void StreamFloats(const FloatVec (&v)[kCount], float* to) {
  ForEach<kCount>([&](int i) { hn::Stream(v[i], FloatTag(), to + i * kLanes); });
}
// Value stored, or added to what is there.
template <int kCount, class T>
HWY_INLINE void StoreFloats(FloatVec (&v)[kCount], bool accumulate, T* to) {
  if (accumulate) {
    FloatVec before[kCount];
    LoadFloats(to, before);
    ForEach<kCount>([&](int i) { v[i] = hn::Add(before[i], v[i]); });
  }
  StoreFloats(v, to);
}

// Elements beyond the last whole block of kSize go through a buffer of one block, padded with
// zeros. The size is part of the type: kernels of several files, with blocks of their own, share
// it.
template <class T, std::int64_t kSize>
struct Tail {
  HWY_ALIGN T values[kSize] = {};
  Tail() = default;
  Tail(const T* from, std::int64_t n) {
    for (std::int64_t j = 0; j < n; ++j) values[j] = from[j];
  }
  void CopyTo(T* to, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) to[j] = values[j];
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
