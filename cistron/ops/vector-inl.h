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

// Stores kLanes elements; bf16 rounds to nearest even and keeps NaN, as bf16's constructor does.
HWY_INLINE void StoreFloat(FloatVec v, float* to) {
  hn::StoreU(v, FloatTag(), to);
}
HWY_INLINE void StoreFloat(FloatVec v, bf16* to) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fff))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(du, 0x40));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
  const auto bits = hn::IfThenElse(is_nan, quiet, rounded);
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

// 2^x within 2 ulp; 0 below −127 (results that would be subnormal), Inf above 128, NaN stays NaN.
// The polynomial is the minimax one of degree 6 on [−1/2, 1/2] in relative error (1.9e-9), with the
// first coefficient set to 1, so that 2^0 is exactly 1.
HWY_INLINE FloatVec Exp2(FloatVec x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  // Max and Min return their second operand when one is NaN (x86), so x comes second.
  x = hn::Min(hn::Set(d, 128.0f), hn::Max(hn::Set(d, -127.0f), x));
  const auto n = hn::NearestInt(x);
  const FloatVec f = hn::Sub(x, hn::ConvertTo(d, n));
  FloatVec p = hn::Set(d, 0.00015345812f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.0013399931f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.009618489f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.05550329f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.24022647f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.6931472f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  // n + 127 is the exponent field: 0 gives 0, 255 gives Inf.
  const auto exponent = hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127)));
  return hn::Mul(p, hn::BitCast(d, exponent));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
