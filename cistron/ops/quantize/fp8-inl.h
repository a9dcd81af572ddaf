// 8-bit floating point in vector registers, compiled once for each instruction set (included after
// foreach_target.h, hence the unusual include guard). The meaning is that of base/float_types.h.
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

#if defined(CISTRON_OPS_QUANTIZE_FP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_QUANTIZE_FP8_INL_H_
#undef CISTRON_OPS_QUANTIZE_FP8_INL_H_
#else
#define CISTRON_OPS_QUANTIZE_FP8_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

using UnsignedTag = hn::RebindToUnsigned<FloatTag>;
using UnsignedVec = hn::Vec<UnsignedTag>;
using SignedTag = hn::RebindToSigned<FloatTag>;
using SignedVec = hn::Vec<SignedTag>;
using CodeTag = hn::Rebind<std::uint8_t, FloatTag>;

template <class Q>
struct Fp8;
template <>
struct Fp8<e4m3> {
  static constexpr int kMantissa = 3, kBias = 7;
};
template <>
struct Fp8<e5m2> {
  static constexpr int kMantissa = 2, kBias = 15;
};

// Bits of |v|, which compare as signed integers do (and AVX2 has no others).
HWY_INLINE SignedVec Magnitude(FloatVec v) {
  const SignedTag d;
  return hn::And(hn::BitCast(d, v), hn::Set(d, 0x7fffffff));
}

// The code of v with its sign in bit 7, for |v| that rounds to no more than the format's maximum.
//
// Adding 2^(e + 23 − mantissa bits) to a magnitude of exponent e leaves, rounded to nearest even by
// the addition itself, the significand of the code in the low bits of the sum; e not below that of
// the smallest normal gives the subnormal codes.
template <class Q>
HWY_INLINE SignedVec EncodeFinite(FloatVec v) {
  using F = Fp8<Q>;
  const FloatTag df;
  const SignedTag d;
  constexpr int kShift = 23 - F::kMantissa;
  const SignedVec bits = hn::BitCast(d, v);
  const SignedVec magnitude = hn::And(bits, hn::Set(d, 0x7fffffff));
  const SignedVec exponent =
      hn::Max(hn::And(bits, hn::Set(d, 0x7f800000)), hn::Set(d, (127 + 1 - F::kBias) << 23));
  const SignedVec magic = hn::Add(exponent, hn::Set(d, kShift << 23));
  const SignedVec sum = hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, magic)));
  // The hidden bit of a normal code adds one to its exponent field, which so starts one lower.
  const SignedVec field =
      hn::Sub(hn::ShiftRight<kShift>(exponent), hn::Set(d, (127 - F::kBias + 1) << F::kMantissa));
  const SignedVec code = hn::Add(hn::Sub(sum, magic), field);
  const SignedVec sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(d, 0x80));
  return hn::Or(code, sign);
}

// The code of any v: saturates, ±Inf included; NaN is 0x7F.
template <class Q>
HWY_INLINE SignedVec Encode(FloatVec v) {
  const FloatTag df;
  const SignedTag d;
  const SignedVec bits = hn::BitCast(d, v);
  const SignedVec magnitude = hn::And(bits, hn::Set(d, 0x7fffffff));
  const SignedVec sign = hn::AndNot(hn::Set(d, 0x7fffffff), bits);
  const SignedVec clamped =
      hn::Min(magnitude, hn::BitCast(d, hn::Set(df, static_cast<float>(Q::kMax))));
  const SignedVec code = EncodeFinite<Q>(hn::BitCast(df, hn::Or(clamped, sign)));
  const auto nan = hn::Gt(magnitude, hn::Set(d, 0x7f800000));
  return hn::IfThenElse(nan, hn::Set(d, 0x7f), code);
}

// Stores kLanes codes.
HWY_INLINE void StoreCodes(SignedVec codes, std::uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  *to = static_cast<std::uint8_t>(hn::GetLane(codes));
#else
  hn::StoreU(hn::U8FromU32(hn::BitCast(UnsignedTag(), codes)), CodeTag(), to);
#endif
}

// Stores the codes of 2·kLanes elements of T that LoadFloats loaded.
template <class T>
HWY_INLINE void StoreCodePair(const SignedVec (&codes)[2], std::uint8_t* to) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    const auto pairs = hn::DemoteTo(d16, hn::Or(codes[0], hn::ShiftLeft<8>(codes[1])));
    hn::StoreU(pairs, d16, reinterpret_cast<std::uint16_t*>(to));
    return;
  }
#endif
  StoreCodes(codes[0], to);
  StoreCodes(codes[1], to + kLanes);
}

#if HWY_TARGET != HWY_SCALAR
// 2·kLanes elements of bf16 as they are.
using HalfTag = hn::Repartition<std::int16_t, FloatTag>;
using HalfVec = hn::Vec<HalfTag>;
HWY_INLINE HalfVec LoadHalves(const bf16* x) {
  return hn::LoadU(HalfTag(), reinterpret_cast<const std::int16_t*>(x));
}

// What EncodeHalves takes from a magnitude: the exponent of the block's scale less the bias.
template <class Q>
HWY_INLINE SignedVec Subtrahends(SignedVec scale_codes) {
  const SignedTag d;
  const SignedVec code = hn::Max(scale_codes, hn::Set(d, 32));
  return hn::ShiftLeft<7>(hn::Sub(code, hn::Set(d, Fp8<Q>::kBias)));
}

// Blocks whose largest magnitude is below this are too small for EncodeHalves, unless it is 0.
inline constexpr std::int32_t kSmallestForHalves = (127 - 80) << 23;

// The codes of bf16 elements of MXFP8 blocks, in half the width of EncodeFinite: exponents are
// moved by subtraction. False, and nothing is stored, if one of them may have a subnormal code.
template <class Q>
HWY_INLINE bool EncodeHalves(HalfVec h, HalfVec subtrahend, std::uint8_t* codes) {
  const HalfTag d;
  constexpr int kShift = 7 - Fp8<Q>::kMantissa;
  const HalfVec moved = hn::Sub(hn::And(h, hn::Set(d, 0x7fff)), subtrahend);
  // From half of the smallest subnormal to the smallest normal.
  const auto subnormal = hn::And(hn::Gt(moved, hn::Set(d, -(Fp8<Q>::kMantissa << 7) - 1)),
                                 hn::Lt(moved, hn::Set(d, 0x80)));
  if (HWY_UNLIKELY(!hn::AllFalse(d, subnormal))) return false;
  const HalfVec m = hn::Max(moved, hn::Zero(d));
  const HalfVec odd = hn::And(hn::ShiftRight<kShift>(m), hn::Set(d, 1));
  const HalfVec code =
      hn::ShiftRight<kShift>(hn::Add(hn::Add(m, hn::Set(d, (1 << (kShift - 1)) - 1)), odd));
  const HalfVec sign = hn::And(hn::ShiftRight<8>(h), hn::Set(d, 0x80));
  const hn::Rebind<std::uint8_t, HalfTag> d8;
  hn::StoreU(hn::DemoteTo(d8, hn::Or(code, sign)), d8, codes);
  return true;
}
#endif

// kLanes codes as f32.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
// A code widened to an f16 is its value but for the bias (e5m2: exactly its value), and the
// processor converts that, subnormals included, without a detour.
template <class Q>
HWY_INLINE FloatVec Decode(const std::uint8_t* codes) {
  const FloatTag df;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> dh;
  const auto wide = hn::PromoteTo(d16, hn::LoadU(CodeTag(), codes));
  if constexpr (Fp8<Q>::kMantissa == 2) {
    return hn::PromoteTo(df, hn::BitCast(dh, hn::ShiftLeft<8>(wide)));
  } else {
    const auto sign = hn::And(hn::ShiftLeft<8>(wide), hn::Set(d16, 0x8000));
    const auto magnitude = hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, 0x3f80));
    const auto nan = hn::VecFromMask(d16, hn::Eq(magnitude, hn::Set(d16, 0x3f80)));
    const auto half = hn::Or(hn::Or(sign, magnitude), hn::And(nan, hn::Set(d16, 0x7c00)));
    return hn::Mul(hn::PromoteTo(df, hn::BitCast(dh, half)), hn::Set(df, 256.0f));
  }
}
#else
// Without f16 instructions: Highway's own widening takes Inf and NaN for numbers.
template <class Q>
HWY_INLINE FloatVec Decode(const std::uint8_t* codes) {
  HWY_ALIGN float values[kLanes];
  for (std::int64_t j = 0; j < kLanes; ++j) values[j] = static_cast<float>(Q::FromBits(codes[j]));
  return hn::Load(FloatTag(), values);
}
#endif

// Calls f with the 8-bit format as a type.
template <class F>
HWY_INLINE void WithFormat(DType format, F&& f) {
  if (format == DType::kE4M3) {
    f(TypeTag<e4m3>());
  } else {
    f(TypeTag<e5m2>());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
