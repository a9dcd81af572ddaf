// Blocks of MXFP8 in vector registers, compiled once for each instruction set (included after
// foreach_target.h, hence the unusual include guard).
//
// Scale codes are those of quantize.h. Codes of elements are made without a multiplication by the
// scale, from the elements' own bits (EncodeAbove), for blocks of common size; AnyBlock is right
// for every block.
#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "cistron/ops/quantize/fp8-inl.h"

#if defined(CISTRON_OPS_QUANTIZE_MXFP8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTRON_OPS_QUANTIZE_MXFP8_INL_H_
#undef CISTRON_OPS_QUANTIZE_MXFP8_INL_H_
#else
#define CISTRON_OPS_QUANTIZE_MXFP8_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {

inline constexpr std::int64_t kMxBlock = 32;
inline constexpr std::int64_t kPair = 2 * kLanes;  // elements that are loaded together
inline constexpr std::int32_t kNanAbove = 0x7f800000;

template <class T>
using PairTail = Tail<T, kPair>;

// Magnitudes are compared as integers of the type's own width.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using Tag = hn::ScalableTag<std::int32_t>;
  static constexpr std::int32_t kMask = 0x7fffffff;
};
template <>
struct Bits<bf16> {
  using Tag = hn::ScalableTag<std::int16_t>;
  static constexpr std::int16_t kMask = 0x7fff;
};
template <class T>
using BitsTag = typename Bits<T>::Tag;
template <class T>
using BitsVec = hn::Vec<BitsTag<T>>;
template <class T>
inline constexpr std::int64_t kBitsLanes = static_cast<std::int64_t>(hn::MaxLanes(BitsTag<T>()));

template <class T>
HWY_INLINE BitsVec<T> LoadMagnitude(const T* x) {
  const BitsTag<T> d;
  const auto bits = hn::LoadU(d, reinterpret_cast<const hn::TFromD<BitsTag<T>>*>(x));
  return hn::And(bits, hn::Set(d, Bits<T>::kMask));
}
template <class T>
HWY_INLINE std::uint32_t MagnitudeOf(T value) {
  return std::bit_cast<std::uint32_t>(static_cast<float>(value)) & 0x7fffffffu;
}

// Codes of the scales of blocks whose largest magnitudes these are; none is NaN.
template <class Q>
HWY_INLINE SignedVec ScaleCodes(FloatVec magnitude) {
  const SignedTag d;
  // fl32(1 / 448) and fl32(1 / 57344).
  const FloatVec t = hn::Mul(magnitude, hn::Set(FloatTag(), 1.0f / Q::kMax));
  const SignedVec bits = hn::BitCast(d, t);
  const SignedVec up = hn::ShiftRight<23>(hn::Add(bits, hn::Set(d, 0x7fffff)));
  // Up to 2^-127 is code 0; Inf, like the numbers below it, is code 254.
  const auto normal = hn::Gt(bits, hn::Set(d, 0x400000));
  return hn::Min(hn::IfThenElseZero(normal, up), hn::Set(d, 254));
}

// 2^(127 − code).
HWY_INLINE FloatVec Multipliers(SignedVec codes) {
  const SignedTag d;
  const SignedVec bits = hn::ShiftLeft<23>(hn::Sub(hn::Set(d, 254), codes));
  return hn::BitCast(FloatTag(), hn::Max(bits, hn::Set(d, 0x400000)));  // 2^-127 for 254
}

// A block of n ≤ 32 values of any size, NaN and Inf included.
template <class Q, class T>
HWY_NOINLINE void AnyBlock(const T* x, std::int64_t n, std::uint8_t* codes, std::uint8_t* scale) {
  std::uint32_t largest = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint32_t bits = MagnitudeOf(x[j]);
    if (bits <= static_cast<std::uint32_t>(kNanAbove)) largest = std::max(largest, bits);
  }
  const SignedVec code = ScaleCodes<Q>(hn::Set(FloatTag(), std::bit_cast<float>(largest)));
  *scale = static_cast<std::uint8_t>(hn::GetLane(code));
  const FloatVec by = hn::Set(FloatTag(), hn::GetLane(Multipliers(code)));
  for (std::int64_t j = 0; j < n; j += kPair) {
    const PairTail<T> tail(x + j, std::min(kPair, n - j));
    PairTail<std::uint8_t> code_tail;
    FloatVec v[2];
    LoadFloats(tail.values, v);
    const SignedVec encoded[2] = {Encode<Q>(hn::Mul(v[0], by)), Encode<Q>(hn::Mul(v[1], by))};
    StoreCodePair<T>(encoded, code_tail.values);
    code_tail.CopyTo(codes + j, std::min(kPair, n - j));
  }
}

#if HWY_TARGET != HWY_SCALAR
// Blocks whose largest magnitude is 0 or within [kSmallestCommon, kBeyondCommon) are of common
// size: EncodeAbove neither overflows for them nor needs exponents below f32's.
inline constexpr std::int32_t kSmallestCommon = 64 << 23;
inline constexpr std::int32_t kBeyondCommon = 225 << 23;

// Whether a magnitude is of a block that is not of common size.
HWY_INLINE auto IsUncommon(SignedVec magnitudes) {
  const SignedTag d;
  const auto small =
      hn::And(hn::Gt(magnitudes, hn::Zero(d)), hn::Lt(magnitudes, hn::Set(d, kSmallestCommon)));
  return hn::Or(small, hn::Gt(magnitudes, hn::Set(d, kBeyondCommon - 1)));
}

// What EncodeAbove needs to know of a block.
struct BlockConstants {
  SignedVec lowest, offset;
};
template <class Q>
HWY_INLINE BlockConstants ConstantsOf(SignedVec scale_codes) {
  const SignedTag d;
  constexpr int kBias = Fp8<Q>::kBias;
  // Zero blocks, whose scale code is 0, may take any constants that exist.
  const SignedVec lowest =
      hn::Add(hn::Max(scale_codes, hn::Set(d, kBias + 31)), hn::Set(d, 1 - kBias));
  return {hn::ShiftLeft<23>(lowest), EncodeOffset<Q>(lowest)};
}

// kPair elements, taken apart once for all codes that are made of them. bf16 falls into even and
// odd elements, as in LoadFloats.
template <class T>
struct ElementPair;
template <>
struct ElementPair<float> {
  SignedVec magnitude[2], exponent[2], sign[2];
  HWY_INLINE explicit ElementPair(const float* x) {
    const SignedTag d;
    ForEach<2>([&](int i) HWY_ATTR {
      const SignedVec bits = hn::BitCast(d, LoadFloat(x + i * kLanes));
      magnitude[i] = hn::And(bits, hn::Set(d, 0x7fffffff));
      exponent[i] = hn::And(bits, hn::Set(d, kNanAbove));
      sign[i] = hn::ShiftRight<24>(bits);
    });
  }
  // Stores the codes that EncodeAbove made of both halves, with their signs.
  HWY_INLINE void Store(SignedVec code0, SignedVec code1, std::uint8_t* to) const {
    const SignedVec bit = hn::Set(SignedTag(), 0x80);
    StoreCodes(hn::OrAnd(code0, sign[0], bit), to);
    StoreCodes(hn::OrAnd(code1, sign[1], bit), to + kLanes);
  }
};
template <>
struct ElementPair<bf16> {
  SignedVec magnitude[2], exponent[2], signs;
  HWY_INLINE explicit ElementPair(const bf16* x) {
    const SignedTag d;
    const SignedVec bits = hn::BitCast(d, hn::LoadU(hn::Repartition<std::int16_t, SignedTag>(),
                                                    reinterpret_cast<const std::int16_t*>(x)));
    const SignedVec low = hn::ShiftLeft<16>(bits);
    magnitude[0] = hn::And(low, hn::Set(d, 0x7fff0000));
    magnitude[1] = hn::And(bits, hn::Set(d, 0x7fff0000));
    exponent[0] = hn::And(low, hn::Set(d, kNanAbove));
    exponent[1] = hn::And(bits, hn::Set(d, kNanAbove));
    signs = hn::And(hn::ShiftRight<8>(bits), hn::Set(d, 0x00800080));
  }
  HWY_INLINE void Store(SignedVec even, SignedVec odd, std::uint8_t* to) const {
    const SignedTag d;
    const hn::Repartition<std::uint16_t, SignedTag> d16;
    const hn::Rebind<std::uint8_t, decltype(d16)> d8;
    const SignedVec merged = hn::IfVecThenElse(hn::Set(d, 0xffff), even, hn::ShiftLeft<16>(odd));
    const SignedVec codes = hn::OrAnd(signs, merged, hn::Set(d, 0x007f007f));
    hn::StoreU(hn::TruncateTo(d8, hn::BitCast(d16, codes)), d8, to);
  }
};

// Stores the codes of a pair whose halves are in these blocks.
template <class Q, class T>
HWY_INLINE void EncodeInBlocks(const ElementPair<T>& x, const BlockConstants& block0,
                               const BlockConstants& block1, std::uint8_t* to) {
  x.Store(EncodeAbove<Q>(x.magnitude[0], x.exponent[0], block0.lowest, block0.offset),
          EncodeAbove<Q>(x.magnitude[1], x.exponent[1], block1.lowest, block1.offset), to);
}

// Largest of the lanes that have the same place within their 128 bits.
template <class D>
HWY_INLINE auto MaxTo128(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> half;
    return MaxTo128(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

// Larger of each pair of lanes of 32 bits, compared as the type's own integers.
template <class T, class V>
HWY_INLINE V MaxAs(V a, V b) {
  const hn::Full128<std::int32_t> d;
  const hn::Repartition<hn::TFromD<BitsTag<T>>, decltype(d)> bits;
  return hn::BitCast(d, hn::Max(hn::BitCast(bits, a), hn::BitCast(bits, b)));
}

// The largest magnitude, as f32's, of each of four blocks whose candidates are in four lanes.
template <class T, class V>
HWY_INLINE V MaxOfFour(V m0, V m1, V m2, V m3) {
  const hn::Full128<std::int32_t> d;
  const hn::Full128<std::int64_t> wide;
  const auto m01 = MaxAs<T>(hn::InterleaveLower(d, m0, m1), hn::InterleaveUpper(d, m0, m1));
  const auto m23 = MaxAs<T>(hn::InterleaveLower(d, m2, m3), hn::InterleaveUpper(d, m2, m3));
  const auto low = hn::BitCast(wide, m01), high = hn::BitCast(wide, m23);
  const auto most = MaxAs<T>(hn::BitCast(d, hn::InterleaveLower(wide, low, high)),
                             hn::BitCast(d, hn::InterleaveUpper(wide, low, high)));
  if constexpr (sizeof(T) == 2) {
    return hn::Max(hn::ShiftLeft<16>(most), hn::And(most, hn::Set(d, 0x7fff0000)));
  } else {
    return most;
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#endif  // include guard toggled for each target
