// Kernels of quantize_rows.h, compiled once for each instruction set.
#include "cistron/ops/quantize/quantize_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantize/quantize_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/quantize/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::Encode;
using ops::HWY_NAMESPACE::EncodeFinite;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
#if HWY_TARGET != HWY_SCALAR
using ops::HWY_NAMESPACE::EncodeHalves;
using ops::HWY_NAMESPACE::HalfTag;
using ops::HWY_NAMESPACE::HalfVec;
using ops::HWY_NAMESPACE::kSmallestForHalves;
using ops::HWY_NAMESPACE::LoadHalves;
using ops::HWY_NAMESPACE::Subtrahends;
#endif
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::LoadFloats;
using ops::HWY_NAMESPACE::SignedTag;
using ops::HWY_NAMESPACE::SignedVec;
using ops::HWY_NAMESPACE::StoreCodePair;
using ops::HWY_NAMESPACE::StoreCodes;
using ops::HWY_NAMESPACE::WithFormat;

constexpr std::int64_t kBlock = 32;         // of MXFP8
constexpr std::int64_t kPair = 2 * kLanes;  // elements that are loaded together
constexpr std::int64_t kBlocksAtOnce = 32;  // of a row

template <class T>
using Tail = ops::HWY_NAMESPACE::Tail<T, kPair>;

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
std::uint32_t MagnitudeOf(T value) {
  return std::bit_cast<std::uint32_t>(static_cast<float>(value)) & 0x7fffffffu;
}

template <class T>
std::uint32_t RowMax(const T* x, std::int64_t n) {
  const BitsTag<T> d;
  auto largest = hn::Zero(d);
  std::int64_t j = 0;
  for (; j + kBitsLanes<T> <= n; j += kBitsLanes<T>) {
    largest = hn::Max(largest, LoadMagnitude(x + j));
  }
  HWY_ALIGN hn::TFromD<BitsTag<T>> lanes[kBitsLanes<T>];
  hn::Store(largest, d, lanes);
  hn::TFromD<BitsTag<T>> most = 0;
  for (std::int64_t i = 0; i < kBitsLanes<T>; ++i) most = std::max(most, lanes[i]);
  std::uint32_t magnitude = static_cast<std::uint32_t>(most) << (sizeof(T) == 2 ? 16 : 0);
  for (; j < n; ++j) magnitude = std::max(magnitude, MagnitudeOf(x[j]));
  return magnitude;
}

template <class T>
void ColumnMax(const T* x, std::int64_t n, T* largest) {
  const BitsTag<T> d;
  auto* to = reinterpret_cast<hn::TFromD<BitsTag<T>>*>(largest);
  std::int64_t j = 0;
  for (; j + kBitsLanes<T> <= n; j += kBitsLanes<T>) {
    hn::StoreU(hn::Max(hn::LoadU(d, to + j), LoadMagnitude(x + j)), d, to + j);
  }
  for (; j < n; ++j) {
    if (MagnitudeOf(x[j]) > MagnitudeOf(largest[j])) largest[j] = x[j];
  }
}

// MXFP8's codes for magnitudes that are not NaN.
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

HWY_INLINE FloatVec Multipliers(SignedVec codes) {
  const SignedTag d;
  const SignedVec bits = hn::ShiftLeft<23>(hn::Sub(hn::Set(d, 254), codes));
  return hn::BitCast(FloatTag(), hn::Max(bits, hn::Set(d, 0x400000)));  // 2^-127 for 254
}

// kPair columns. Returns whether EncodeHalves may be used, Inf apart.
template <class Q, class T>
HWY_INLINE bool ScalesPair(const T* largest, std::uint8_t* codes, float* multipliers,
                           std::int16_t* moves) {
  const SignedTag d;
  FloatVec v[2];
  LoadFloats(largest, v);
  SignedVec code[2];
  bool common = true;
  for (int i = 0; i < 2; ++i) {
    const SignedVec bits = hn::And(hn::BitCast(d, v[i]), hn::Set(d, 0x7fffffff));
    code[i] = ScaleCodes<Q>(hn::BitCast(FloatTag(), bits));
    hn::StoreU(Multipliers(code[i]), FloatTag(), multipliers + i * kLanes);
#if HWY_TARGET != HWY_SCALAR
    const auto small =
        hn::And(hn::Gt(bits, hn::Zero(d)), hn::Lt(bits, hn::Set(d, kSmallestForHalves)));
    common = common && hn::AllFalse(d, small);
#endif
  }
  StoreCodePair<T>(code, codes);
#if HWY_TARGET != HWY_SCALAR
  const SignedVec m0 = Subtrahends<Q>(code[0]), m1 = Subtrahends<Q>(code[1]);
  if constexpr (sizeof(T) == 2) {  // LoadFloats takes even and odd elements apart
    const SignedVec pairs = hn::Or(hn::And(m0, hn::Set(d, 0xffff)), hn::ShiftLeft<16>(m1));
    hn::StoreU(hn::BitCast(HalfTag(), pairs), HalfTag(), moves);
  } else {
    const hn::Rebind<std::int16_t, FloatTag> narrow;
    hn::StoreU(hn::DemoteTo(narrow, m0), narrow, moves);
    hn::StoreU(hn::DemoteTo(narrow, m1), narrow, moves + kLanes);
  }
#else
  std::fill_n(moves, kPair, std::int16_t{0});
#endif
  return common;
}

template <class Q, class T>
bool ScalesRow(const T* largest, std::int64_t n, std::uint8_t* codes, float* multipliers,
               std::int16_t* moves) {
  bool common = true;
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) {
    common &= ScalesPair<Q>(largest + j, codes + j, multipliers + j, moves + j);
  }
  if (j < n) {
    const Tail<T> tail(largest + j, n - j);
    Tail<std::uint8_t> code_tail;
    common &= ScalesPair<Q>(tail.values, code_tail.values, multipliers + j, moves + j);
    code_tail.CopyTo(codes + j, n - j);
  }
  return common;
}

// s of the "others" of quantize.h.
HWY_INLINE FloatVec ScalesFromAmax(FloatVec amax, float most, bool power_of_two) {
  const FloatTag d;
  const SignedTag di;
  constexpr float kHighest = std::numeric_limits<float>::max();
  FloatVec s = hn::Min(hn::Div(hn::Set(d, most), amax), hn::Set(d, kHighest));
  if (power_of_two) {
    s = hn::BitCast(d, hn::And(hn::BitCast(di, s), hn::Set(di, 0x7f800000)));
  }
  const SignedVec bits = hn::BitCast(di, amax);
  const auto ordinary = hn::And(hn::Gt(bits, hn::Zero(di)), hn::Lt(bits, hn::Set(di, 0x7f800000)));
  return hn::IfThenElse(hn::RebindMask(d, ordinary), s, hn::Set(d, 1.0f));
}

// kPair columns.
template <class T>
HWY_INLINE void F32ScalesPair(const T* largest, float most, bool power_of_two, float* scales,
                              float* multipliers) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec magnitude = hn::BitCast(d, hn::Set(SignedTag(), 0x7fffffff));
  const FloatVec m0 = ScalesFromAmax(hn::And(LoadFloat(largest), magnitude), most, power_of_two);
  const FloatVec m1 =
      ScalesFromAmax(hn::And(LoadFloat(largest + kLanes), magnitude), most, power_of_two);
  hn::StoreU(hn::Div(one, m0), d, scales);
  hn::StoreU(hn::Div(one, m1), d, scales + kLanes);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {  // LoadFloats takes even and odd elements apart
    hn::StoreU(hn::ConcatEven(d, m1, m0), d, multipliers);
    hn::StoreU(hn::ConcatOdd(d, m1, m0), d, multipliers + kLanes);
    return;
  }
#endif
  hn::StoreU(m0, d, multipliers);
  hn::StoreU(m1, d, multipliers + kLanes);
}

template <class T>
void F32ScalesRow(const T* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
                  float* multipliers) {
  const float most = format == DType::kE4M3 ? e4m3::kMax : e5m2::kMax;
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) {
    F32ScalesPair(largest + j, most, power_of_two, scales + j, multipliers + j);
  }
  if (j < n) {
    const Tail<T> tail(largest + j, n - j);
    Tail<float> scale_tail;
    F32ScalesPair(tail.values, most, power_of_two, scale_tail.values, multipliers + j);
    scale_tail.CopyTo(scales + j, n - j);
  }
}

// kPair columns.
template <bool kFinite, class Q, class T>
HWY_INLINE void EncodePair(const T* x, FloatVec multiplier0, FloatVec multiplier1,
                           std::uint8_t* codes) {
  FloatVec v[2];
  LoadFloats(x, v);
  v[0] = hn::Mul(v[0], multiplier0);
  v[1] = hn::Mul(v[1], multiplier1);
  if constexpr (kFinite) {
    const SignedVec code[2] = {EncodeFinite<Q>(v[0]), EncodeFinite<Q>(v[1])};
    StoreCodePair<T>(code, codes);
  } else {
    const SignedVec code[2] = {Encode<Q>(v[0]), Encode<Q>(v[1])};
    StoreCodePair<T>(code, codes);
  }
}

template <bool kFinite, class Q, class T>
HWY_INLINE void EncodeWith(const T* x, std::int64_t n, const float* multipliers, std::int64_t ahead,
                           std::uint8_t* codes) {
  const FloatTag d;
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(T));
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) {
    for (std::int64_t i = 0; i < kPair; i += kLine) __builtin_prefetch(x + j + i + ahead);
    EncodePair<kFinite, Q>(x + j, hn::LoadU(d, multipliers + j),
                           hn::LoadU(d, multipliers + j + kLanes), codes + j);
  }
  if (j < n) {
    const Tail<T> tail(x + j, n - j);
    Tail<std::uint8_t> code_tail;
    EncodePair<kFinite, Q>(tail.values, hn::LoadU(d, multipliers + j),
                           hn::LoadU(d, multipliers + j + kLanes), code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}

#if HWY_TARGET != HWY_SCALAR
template <class Q>
HWY_INLINE void EncodeMoved(const bf16* x, std::int64_t n, const float* multipliers,
                            const std::int16_t* moves, std::int64_t ahead, std::uint8_t* codes) {
  const FloatTag d;
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(bf16));
  const auto pair = [&](const bf16* from, std::int64_t j, std::uint8_t* to) HWY_ATTR {
    if (EncodeHalves<Q>(LoadHalves(from), hn::LoadU(HalfTag(), moves + j), to)) return;
    EncodePair<true, Q>(from, hn::LoadU(d, multipliers + j), hn::LoadU(d, multipliers + j + kLanes),
                        to);
  };
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) {
    for (std::int64_t i = 0; i < kPair; i += kLine) __builtin_prefetch(x + j + i + ahead);
    pair(x + j, j, codes + j);
  }
  if (j < n) {
    const Tail<bf16> tail(x + j, n - j);
    Tail<std::uint8_t> code_tail;
    pair(tail.values, j, code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}
#endif

template <class Q, class T>
void EncodeByColumn(const T* x, std::int64_t n, const float* multipliers, const std::int16_t* moves,
                    bool finite, std::int64_t ahead, std::uint8_t* codes) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 2) {
    if (finite && moves != nullptr) {
      return EncodeMoved<Q>(x, n, multipliers, moves, ahead, codes);
    }
  }
#endif
  if (finite) {
    EncodeWith<true, Q>(x, n, multipliers, ahead, codes);
  } else {
    EncodeWith<false, Q>(x, n, multipliers, ahead, codes);
  }
}

template <class Q, class T>
void EncodeByOne(const T* x, std::int64_t n, float multiplier, std::uint8_t* codes) {
  const FloatVec by = hn::Set(FloatTag(), multiplier);
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) EncodePair<false, Q>(x + j, by, by, codes + j);
  if (j < n) {
    const Tail<T> tail(x + j, n - j);
    Tail<std::uint8_t> code_tail;
    EncodePair<false, Q>(tail.values, by, by, code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}

// A block with NaN or Inf, or one that is not whole.
template <class Q, class T>
HWY_NOINLINE void QuantizeAnyBlock(const T* x, std::int64_t n, std::uint8_t* codes,
                                   std::uint8_t* scale) {
  std::uint32_t largest = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint32_t bits = MagnitudeOf(x[j]);
    if (bits <= kInfMagnitude) largest = std::max(largest, bits);
  }
  const SignedVec code = ScaleCodes<Q>(hn::Set(FloatTag(), std::bit_cast<float>(largest)));
  *scale = static_cast<std::uint8_t>(hn::GetLane(code));
  EncodeByOne<Q>(x, n, hn::GetLane(Multipliers(code)), codes);
}

#if HWY_TARGET == HWY_SCALAR
// Largest magnitudes of `count` whole blocks.
template <class T>
void BlockMax(const T* x, std::int64_t count, std::int32_t* largest) {
  for (std::int64_t b = 0; b < count; ++b) {
    largest[b] = static_cast<std::int32_t>(RowMax(x + b * kBlock, kBlock));
  }
}
#else
template <class D>
HWY_INLINE auto MaxTo128(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<D>) > 16) {
    const hn::Half<D> half;
    return MaxTo128(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

// Four lanes of 32 bits that hold the candidates of one block.
template <class T>
HWY_INLINE auto BlockCandidates(const T* x) {
  auto largest = LoadMagnitude(x);
  for (std::int64_t j = kBitsLanes<T>; j < kBlock; j += kBitsLanes<T>) {
    largest = hn::Max(largest, LoadMagnitude(x + j));
  }
  return MaxTo128(BitsTag<T>(), largest);
}

// Larger of each pair of lanes of 32 bits, compared as the type's own integers.
template <class T, class V>
HWY_INLINE V MaxAs(V a, V b) {
  const hn::Full128<std::int32_t> d;
  const hn::Repartition<hn::TFromD<BitsTag<T>>, decltype(d)> bits;
  return hn::BitCast(d, hn::Max(hn::BitCast(bits, a), hn::BitCast(bits, b)));
}

// Largest magnitudes of `count` whole blocks, four at a time: `largest` is written beyond them up
// to a multiple of four.
template <class T>
void BlockMax(const T* x, std::int64_t count, std::int32_t* largest) {
  const hn::Full128<std::int32_t> d;
  const hn::Full128<std::int64_t> wide;
  for (std::int64_t b = 0; b < count; b += 4) {
    const auto block = [&](std::int64_t i) HWY_ATTR {
      return hn::BitCast(d, BlockCandidates(x + std::min(b + i, count - 1) * kBlock));
    };
    const auto m0 = block(0), m1 = block(1), m2 = block(2), m3 = block(3);
    const auto m01 = MaxAs<T>(hn::InterleaveLower(d, m0, m1), hn::InterleaveUpper(d, m0, m1));
    const auto m23 = MaxAs<T>(hn::InterleaveLower(d, m2, m3), hn::InterleaveUpper(d, m2, m3));
    const auto low = hn::BitCast(wide, m01), high = hn::BitCast(wide, m23);
    auto most = MaxAs<T>(hn::BitCast(d, hn::InterleaveLower(wide, low, high)),
                         hn::BitCast(d, hn::InterleaveUpper(wide, low, high)));
    if constexpr (sizeof(T) == 2) {
      most = hn::Max(hn::ShiftLeft<16>(most), hn::And(most, hn::Set(d, 0x7fff0000)));
    }
    hn::StoreU(most, d, largest + b);
  }
}
#endif

template <class Q, class T>
void RowMxfp8(const T* x, std::int64_t n, std::uint8_t* codes, std::uint8_t* scales) {
  const FloatTag d;
  HWY_ALIGN std::int32_t largest[kBlocksAtOnce];
  HWY_ALIGN float multipliers[kBlocksAtOnce];
#if HWY_TARGET != HWY_SCALAR
  HWY_ALIGN std::int16_t moves[kBlocksAtOnce];
#endif
  HWY_ALIGN std::uint8_t scale_codes[kBlocksAtOnce];
  while (n >= kBlock) {
    const std::int64_t count = std::min(n / kBlock, kBlocksAtOnce);
    BlockMax(x, count, largest);
    for (std::int64_t b = 0; b < count; b += kLanes) {
      const SignedVec code = ScaleCodes<Q>(hn::BitCast(d, hn::Load(SignedTag(), largest + b)));
      StoreCodes(code, scale_codes + b);
      hn::Store(Multipliers(code), d, multipliers + b);
#if HWY_TARGET != HWY_SCALAR
      const hn::Rebind<std::int16_t, FloatTag> narrow;
      hn::StoreU(hn::DemoteTo(narrow, Subtrahends<Q>(code)), narrow, moves + b);
#endif
    }
    for (std::int64_t b = 0; b < count; ++b) {
      if (HWY_UNLIKELY(static_cast<std::uint32_t>(largest[b]) >= kInfMagnitude)) {
        QuantizeAnyBlock<Q>(x + b * kBlock, kBlock, codes + b * kBlock, scale_codes + b);
        continue;
      }
      const FloatVec by = hn::Set(d, multipliers[b]);
      for (std::int64_t j = b * kBlock; j < (b + 1) * kBlock; j += kPair) {
#if HWY_TARGET != HWY_SCALAR
        if constexpr (sizeof(T) == 2) {
          const bool common = largest[b] == 0 || largest[b] >= kSmallestForHalves;
          const HalfVec move = hn::Set(HalfTag(), moves[b]);
          if (common && EncodeHalves<Q>(LoadHalves(x + j), move, codes + j)) continue;
        }
#endif
        EncodePair<true, Q>(x + j, by, by, codes + j);
      }
    }
    for (std::int64_t b = 0; b < count; ++b) scales[b] = scale_codes[b];
    x += count * kBlock;
    codes += count * kBlock;
    scales += count;
    n -= count * kBlock;
  }
  if (n > 0) QuantizeAnyBlock<Q>(x, n, codes, scales);
}

// Entry points of one instruction set.
std::uint32_t RowMaxF32(const float* x, std::int64_t n) {
  return RowMax(x, n);
}
std::uint32_t RowMaxBF16(const bf16* x, std::int64_t n) {
  return RowMax(x, n);
}
void ColumnMaxF32(const float* x, std::int64_t n, float* to) {
  ColumnMax(x, n, to);
}
void ColumnMaxBF16(const bf16* x, std::int64_t n, bf16* to) {
  ColumnMax(x, n, to);
}
template <class T>
bool ScalesAny(const T* largest, std::int64_t n, DType format, std::uint8_t* codes,
               float* multipliers, std::int16_t* moves) {
  bool common = false;
  WithFormat(format, [&](auto q) HWY_ATTR {
    common = ScalesRow<typename decltype(q)::type>(largest, n, codes, multipliers, moves);
  });
  return common;
}
bool ScalesF32(const float* largest, std::int64_t n, DType format, std::uint8_t* codes,
               float* multipliers, std::int16_t* moves) {
  return ScalesAny(largest, n, format, codes, multipliers, moves);
}
bool ScalesBF16(const bf16* largest, std::int64_t n, DType format, std::uint8_t* codes,
                float* multipliers, std::int16_t* moves) {
  return ScalesAny(largest, n, format, codes, multipliers, moves);
}
void F32ScalesF32(const float* largest, std::int64_t n, DType format, bool power_of_two,
                  float* scales, float* multipliers) {
  F32ScalesRow(largest, n, format, power_of_two, scales, multipliers);
}
void F32ScalesBF16(const bf16* largest, std::int64_t n, DType format, bool power_of_two,
                   float* scales, float* multipliers) {
  F32ScalesRow(largest, n, format, power_of_two, scales, multipliers);
}
template <class T>
void EncodeColumns(const T* x, std::int64_t n, DType format, const float* multipliers,
                   const std::int16_t* moves, bool finite, std::int64_t ahead,
                   std::uint8_t* codes) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    EncodeByColumn<typename decltype(q)::type>(x, n, multipliers, moves, finite, ahead, codes);
  });
}
template <class T>
void EncodeOne(const T* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    EncodeByOne<typename decltype(q)::type>(x, n, multiplier, codes);
  });
}
template <class T>
void RowBlocks(const T* x, std::int64_t n, DType format, std::uint8_t* codes,
               std::uint8_t* scales) {
  WithFormat(format,
             [&](auto q) HWY_ATTR { RowMxfp8<typename decltype(q)::type>(x, n, codes, scales); });
}
void EncodeColumnsF32(const float* x, std::int64_t n, DType format, const float* multipliers,
                      const std::int16_t* moves, bool finite, std::int64_t ahead,
                      std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, moves, finite, ahead, codes);
}
void EncodeColumnsBF16(const bf16* x, std::int64_t n, DType format, const float* multipliers,
                       const std::int16_t* moves, bool finite, std::int64_t ahead,
                       std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, moves, finite, ahead, codes);
}
void EncodeOneF32(const float* x, std::int64_t n, DType format, float multiplier,
                  std::uint8_t* codes) {
  EncodeOne(x, n, format, multiplier, codes);
}
void EncodeOneBF16(const bf16* x, std::int64_t n, DType format, float multiplier,
                   std::uint8_t* codes) {
  EncodeOne(x, n, format, multiplier, codes);
}
void RowBlocksF32(const float* x, std::int64_t n, DType format, std::uint8_t* codes,
                  std::uint8_t* scales) {
  RowBlocks(x, n, format, codes, scales);
}
void RowBlocksBF16(const bf16* x, std::int64_t n, DType format, std::uint8_t* codes,
                   std::uint8_t* scales) {
  RowBlocks(x, n, format, codes, scales);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(RowMaxF32);
HWY_EXPORT(RowMaxBF16);
HWY_EXPORT(ColumnMaxF32);
HWY_EXPORT(ColumnMaxBF16);
HWY_EXPORT(F32ScalesF32);
HWY_EXPORT(F32ScalesBF16);
HWY_EXPORT(ScalesF32);
HWY_EXPORT(ScalesBF16);
HWY_EXPORT(EncodeColumnsF32);
HWY_EXPORT(EncodeColumnsBF16);
HWY_EXPORT(EncodeOneF32);
HWY_EXPORT(EncodeOneBF16);
HWY_EXPORT(RowBlocksF32);
HWY_EXPORT(RowBlocksBF16);

}  // namespace

std::uint32_t MaxMagnitude(const float* x, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RowMaxF32)(x, n);
}
std::uint32_t MaxMagnitude(const bf16* x, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RowMaxBF16)(x, n);
}
void MaxMagnitudes(const float* x, std::int64_t n, float* largest) {
  HWY_DYNAMIC_DISPATCH(ColumnMaxF32)(x, n, largest);
}
void MaxMagnitudes(const bf16* x, std::int64_t n, bf16* largest) {
  HWY_DYNAMIC_DISPATCH(ColumnMaxBF16)(x, n, largest);
}
bool Mxfp8Scales(const float* largest, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers, std::int16_t* moves) {
  return HWY_DYNAMIC_DISPATCH(ScalesF32)(largest, n, format, codes, multipliers, moves);
}
bool Mxfp8Scales(const bf16* largest, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers, std::int16_t* moves) {
  return HWY_DYNAMIC_DISPATCH(ScalesBF16)(largest, n, format, codes, multipliers, moves);
}
void F32Scales(const float* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers) {
  HWY_DYNAMIC_DISPATCH(F32ScalesF32)(largest, n, format, power_of_two, scales, multipliers);
}
void F32Scales(const bf16* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers) {
  HWY_DYNAMIC_DISPATCH(F32ScalesBF16)(largest, n, format, power_of_two, scales, multipliers);
}
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers,
               const std::int16_t* moves, bool finite, std::int64_t ahead, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsF32)(x, n, format, multipliers, moves, finite, ahead, codes);
}
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers,
               const std::int16_t* moves, bool finite, std::int64_t ahead, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsBF16)(x, n, format, multipliers, moves, finite, ahead, codes);
}
void EncodeRow(const float* x, std::int64_t n, DType format, float multiplier,
               std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeOneF32)(x, n, format, multiplier, codes);
}
void EncodeRow(const bf16* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeOneBF16)(x, n, format, multiplier, codes);
}
void QuantizeRowMxfp8(const float* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales) {
  HWY_DYNAMIC_DISPATCH(RowBlocksF32)(x, n, format, codes, scales);
}
void QuantizeRowMxfp8(const bf16* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales) {
  HWY_DYNAMIC_DISPATCH(RowBlocksBF16)(x, n, format, codes, scales);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
