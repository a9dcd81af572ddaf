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

// What EncodeAbove adds to an exponent.
template <class Q>
HWY_INLINE SignedVec EncodeOffset(SignedVec lowest_exponent) {
  const SignedTag d;
  constexpr int kMantissa = Fp8<Q>::kMantissa;
  const SignedVec low = hn::Neg(hn::ShiftLeft<kMantissa>(lowest_exponent));
  return hn::Add(hn::And(low, hn::Set(d, 0xff)), hn::Set(d, (23 - kMantissa) << 23));
}

// The code of an element, given |element| and its exponent bits, in the low 8 bits; the sign is
// left out and the other bits are not said. `lowest`: exponent bits of the smallest element that
// has a normal code; `offset`: EncodeOffset of it as a number.
//
// Adding 2^(e + 23 − mantissa bits), e the exponent of the element but not below `lowest`, leaves
// the element's significand, rounded to nearest even by the addition itself, in the low bits of the
// sum. The code is that plus (e − lowest's) in units of the exponent field, modulo 256: the part of
// `lowest` is an even number of units in the last place, which the same addition brings along in
// the low bits of `offset` without moving a tie.
template <class Q>
HWY_INLINE SignedVec EncodeAbove(SignedVec magnitude, SignedVec exponent, SignedVec lowest,
                                 SignedVec offset) {
  const FloatTag df;
  const SignedTag d;
  const SignedVec e = hn::Max(exponent, lowest);
  const SignedVec magic = hn::Add(e, offset);
  const SignedVec sum = hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, magic)));
  return hn::Add(sum, hn::ShiftRight<23 - Fp8<Q>::kMantissa>(e));
}

// The code of v with its sign in the low 8 bits, the other bits are not said; for |v| that rounds
// to no more than the format's maximum.
template <class Q>
HWY_INLINE SignedVec EncodeFinite(FloatVec v) {
  const SignedTag d;
  const SignedVec lowest = hn::Set(d, 127 + 1 - Fp8<Q>::kBias);
  const SignedVec bits = hn::BitCast(d, v);
  const SignedVec code =
      EncodeAbove<Q>(hn::And(bits, hn::Set(d, 0x7fffffff)), hn::And(bits, hn::Set(d, 0x7f800000)),
                     hn::ShiftLeft<23>(lowest), EncodeOffset<Q>(lowest));
  return hn::OrAnd(code, hn::ShiftRight<24>(bits), hn::Set(d, 0x80));
}

// As EncodeFinite for any v: saturates, ±Inf included; NaN is 0x7F.
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

// Stores the low 8 bits of each lane.
HWY_INLINE void StoreCodes(SignedVec codes, std::uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  *to = static_cast<std::uint8_t>(hn::GetLane(codes));
#else
  hn::StoreU(hn::TruncateTo(CodeTag(), hn::BitCast(UnsignedTag(), codes)), CodeTag(), to);
#endif
}

// The same for 2·kLanes elements of T that LoadFloats loaded.
template <class T>
HWY_INLINE void StoreCodePair(const SignedVec (&codes)[2], std::uint8_t* to) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    const SignedVec pairs =
        hn::IfVecThenElse(hn::Set(SignedTag(), 0xff), codes[0], hn::ShiftLeft<8>(codes[1]));
    hn::StoreU(hn::TruncateTo(d16, hn::BitCast(UnsignedTag(), pairs)), d16,
               reinterpret_cast<std::uint16_t*>(to));
    return;
  }
#endif
  StoreCodes(codes[0], to);
  StoreCodes(codes[1], to + kLanes);
}

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
