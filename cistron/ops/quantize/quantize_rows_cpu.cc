// Kernels of quantize_rows.h, compiled once for each instruction set.
#include "cistron/ops/quantize/quantize_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cistron/ops/quantize/quantize.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantize/quantize_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/quantize/mxfp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace ops::HWY_NAMESPACE;  // NOLINT: the vector helpers of this instruction set

constexpr std::int64_t kBlocksAtOnce = 32;  // of a row
constexpr std::int64_t kAhead = 1024;       // values that are asked for before they are read

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
    const PairTail<T> tail(largest + j, n - j);
    PairTail<float> scale_tail;
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
    for (std::int64_t i = 0; i < kPair; i += kLine) {
      __builtin_prefetch(x + j + i + ahead, 0, 2);
    }
    __builtin_prefetch(codes + j + ahead, 0, 2);
    EncodePair<kFinite, Q>(x + j, hn::LoadU(d, multipliers + j),
                           hn::LoadU(d, multipliers + j + kLanes), codes + j);
  }
  if (j < n) {
    const PairTail<T> tail(x + j, n - j);
    PairTail<std::uint8_t> code_tail;
    EncodePair<kFinite, Q>(tail.values, hn::LoadU(d, multipliers + j),
                           hn::LoadU(d, multipliers + j + kLanes), code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}

template <bool kFinite, class Q, class T>
HWY_INLINE void EncodeByOne(const T* x, std::int64_t n, float multiplier, std::uint8_t* codes) {
  const FloatVec by = hn::Set(FloatTag(), multiplier);
  std::int64_t j = 0;
  for (; j + kPair <= n; j += kPair) EncodePair<kFinite, Q>(x + j, by, by, codes + j);
  if (j < n) {
    const PairTail<T> tail(x + j, n - j);
    PairTail<std::uint8_t> code_tail;
    EncodePair<kFinite, Q>(tail.values, by, by, code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}

#if HWY_TARGET == HWY_SCALAR
template <class Q, class T>
void QuantizeBlocks(const T* x, std::int64_t count, std::uint8_t* codes, std::uint8_t* scales) {
  for (std::int64_t b = 0; b < count; ++b) {
    AnyBlock<Q>(x + b * kMxBlock, kMxBlock, codes + b * kMxBlock, scales + b);
  }
}
#else
// Four lanes of 32 bits that hold the candidates of one block.
template <class T>
HWY_INLINE auto BlockCandidates(const T* x) {
  auto largest = LoadMagnitude(x);
  for (std::int64_t j = kBitsLanes<T>; j < kMxBlock; j += kBitsLanes<T>) {
    largest = hn::Max(largest, LoadMagnitude(x + j));
  }
  return MaxTo128(BitsTag<T>(), largest);
}

// Largest magnitudes of `count` whole blocks, four at a time: `largest` is written beyond them up
// to a multiple of four.
template <class T>
HWY_INLINE void BlockMax(const T* x, std::int64_t count, std::int32_t* largest) {
  const hn::Full128<std::int32_t> d;
  for (std::int64_t b = 0; b < count; b += 4) {
    const auto block = [&](std::int64_t i) HWY_ATTR {
      return hn::BitCast(d, BlockCandidates(x + std::min(b + i, count - 1) * kMxBlock));
    };
    hn::StoreU(MaxOfFour<T>(block(0), block(1), block(2), block(3)), d, largest + b);
  }
}

// At most kBlocksAtOnce whole blocks.
template <class Q, class T>
void QuantizeBlocks(const T* x, std::int64_t count, std::uint8_t* codes, std::uint8_t* scales) {
  const SignedTag d;
  HWY_ALIGN std::int32_t largest[kBlocksAtOnce] = {};
  HWY_ALIGN std::int32_t lowest[kBlocksAtOnce], offset[kBlocksAtOnce];
  HWY_ALIGN std::uint8_t scale_codes[kBlocksAtOnce];
  BlockMax(x, count, largest);
  for (std::int64_t b = count; b < kBlocksAtOnce; ++b) largest[b] = 0;
  auto uncommon = hn::Lt(hn::Zero(d), hn::Zero(d));
  for (std::int64_t b = 0; b < kBlocksAtOnce; b += kLanes) {
    const SignedVec magnitudes = hn::Load(d, largest + b);
    uncommon = hn::Or(uncommon, IsUncommon(magnitudes));
    const SignedVec code = ScaleCodes<Q>(hn::BitCast(FloatTag(), magnitudes));
    const BlockConstants constants = ConstantsOf<Q>(code);
    StoreCodes(code, scale_codes + b);
    hn::Store(constants.lowest, d, lowest + b);
    hn::Store(constants.offset, d, offset + b);
  }
  const bool all_common = hn::AllFalse(d, uncommon);
  for (std::int64_t b = 0; b < count; ++b) {
    const bool common =
        largest[b] == 0 || (largest[b] >= kSmallestCommon && largest[b] < kBeyondCommon);
    if (HWY_UNLIKELY(!all_common && !common)) {
      AnyBlock<Q>(x + b * kMxBlock, kMxBlock, codes + b * kMxBlock, scale_codes + b);
      continue;
    }
    const BlockConstants block{hn::Set(d, lowest[b]), hn::Set(d, offset[b])};
    for (std::int64_t j = 0; j < kMxBlock; j += 64 / static_cast<std::int64_t>(sizeof(T))) {
      __builtin_prefetch(x + b * kMxBlock + kAhead + j);
    }
    for (std::int64_t j = b * kMxBlock; j < (b + 1) * kMxBlock; j += kPair) {
      const ElementPair<T> pair(x + j);
      EncodeInBlocks<Q>(pair, block, block, codes + j);
    }
  }
  std::copy_n(scale_codes, count, scales);
}
#endif

template <class Q, class T>
void RowMxfp8(const T* x, std::int64_t n, std::uint8_t* codes, std::uint8_t* scales) {
  for (; n >= kMxBlock;) {
    const std::int64_t count = std::min(n / kMxBlock, kBlocksAtOnce);
    QuantizeBlocks<Q>(x, count, codes, scales);
    x += count * kMxBlock;
    codes += count * kMxBlock;
    scales += count;
    n -= count * kMxBlock;
  }
  if (n > 0) AnyBlock<Q>(x, n, codes, scales);
}

// Blocks of `block` values with scales in f32.
template <class Q, class T>
void RowF32(const T* x, std::int64_t n, std::int64_t block, DType format, bool power_of_two,
            std::uint8_t* codes, float* scales) {
  for (std::int64_t j = 0; j < n; j += block, ++scales) {
    const std::int64_t count = std::min(block, n - j);
    for (std::int64_t i = 0; i < count; i += 64 / static_cast<std::int64_t>(sizeof(T))) {
      __builtin_prefetch(x + j + kAhead + i);
    }
    const std::uint32_t largest = RowMax(x + j, count);
    const float multiplier = ScaleFromAmax(AmaxOf(largest), format, power_of_two);
    *scales = 1.0f / multiplier;
    if (largest < kInfMagnitude) {
      EncodeByOne<true, Q>(x + j, count, multiplier, codes + j);
    } else {
      EncodeByOne<false, Q>(x + j, count, multiplier, codes + j);
    }
  }
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
void F32ScalesF32(const float* largest, std::int64_t n, DType format, bool power_of_two,
                  float* scales, float* multipliers) {
  F32ScalesRow(largest, n, format, power_of_two, scales, multipliers);
}
void F32ScalesBF16(const bf16* largest, std::int64_t n, DType format, bool power_of_two,
                   float* scales, float* multipliers) {
  F32ScalesRow(largest, n, format, power_of_two, scales, multipliers);
}
template <class T>
void EncodeColumns(const T* x, std::int64_t n, DType format, const float* multipliers, bool finite,
                   std::int64_t ahead, std::uint8_t* codes) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    using Q = typename decltype(q)::type;
    if (finite) {
      EncodeWith<true, Q>(x, n, multipliers, ahead, codes);
    } else {
      EncodeWith<false, Q>(x, n, multipliers, ahead, codes);
    }
  });
}
template <class T>
void EncodeOne(const T* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    EncodeByOne<false, typename decltype(q)::type>(x, n, multiplier, codes);
  });
}
template <class T>
void RowBlocks(const T* x, std::int64_t n, DType format, std::uint8_t* codes,
               std::uint8_t* scales) {
  WithFormat(format,
             [&](auto q) HWY_ATTR { RowMxfp8<typename decltype(q)::type>(x, n, codes, scales); });
}
template <class T>
void RowF32Blocks(const T* x, std::int64_t n, std::int64_t block, DType format, bool power_of_two,
                  std::uint8_t* codes, float* scales) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    RowF32<typename decltype(q)::type>(x, n, block, format, power_of_two, codes, scales);
  });
}
void EncodeColumnsF32(const float* x, std::int64_t n, DType format, const float* multipliers,
                      bool finite, std::int64_t ahead, std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, finite, ahead, codes);
}
void EncodeColumnsBF16(const bf16* x, std::int64_t n, DType format, const float* multipliers,
                       bool finite, std::int64_t ahead, std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, finite, ahead, codes);
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
void RowF32BlocksF32(const float* x, std::int64_t n, std::int64_t block, DType format,
                     bool power_of_two, std::uint8_t* codes, float* scales) {
  RowF32Blocks(x, n, block, format, power_of_two, codes, scales);
}
void RowF32BlocksBF16(const bf16* x, std::int64_t n, std::int64_t block, DType format,
                      bool power_of_two, std::uint8_t* codes, float* scales) {
  RowF32Blocks(x, n, block, format, power_of_two, codes, scales);
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
HWY_EXPORT(EncodeColumnsF32);
HWY_EXPORT(EncodeColumnsBF16);
HWY_EXPORT(EncodeOneF32);
HWY_EXPORT(EncodeOneBF16);
HWY_EXPORT(RowBlocksF32);
HWY_EXPORT(RowBlocksBF16);
HWY_EXPORT(RowF32BlocksF32);
HWY_EXPORT(RowF32BlocksBF16);

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
void F32Scales(const float* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers) {
  HWY_DYNAMIC_DISPATCH(F32ScalesF32)(largest, n, format, power_of_two, scales, multipliers);
}
void F32Scales(const bf16* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers) {
  HWY_DYNAMIC_DISPATCH(F32ScalesBF16)(largest, n, format, power_of_two, scales, multipliers);
}
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::int64_t ahead, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsF32)(x, n, format, multipliers, finite, ahead, codes);
}
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::int64_t ahead, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsBF16)(x, n, format, multipliers, finite, ahead, codes);
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
void QuantizeRowF32(const float* x, std::int64_t n, std::int64_t block, DType format,
                    bool power_of_two, std::uint8_t* codes, float* scales) {
  HWY_DYNAMIC_DISPATCH(RowF32BlocksF32)(x, n, block, format, power_of_two, codes, scales);
}
void QuantizeRowF32(const bf16* x, std::int64_t n, std::int64_t block, DType format,
                    bool power_of_two, std::uint8_t* codes, float* scales) {
  HWY_DYNAMIC_DISPATCH(RowF32BlocksBF16)(x, n, block, format, power_of_two, codes, scales);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
