// Vector kernels of quantize, compiled once for each instruction set.
#include "cistron/ops/quantize/quantize_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantize/quantize_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/quantize/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::Decode;
using ops::HWY_NAMESPACE::Encode;
using ops::HWY_NAMESPACE::EncodeFinite;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::Magnitude;
using ops::HWY_NAMESPACE::SignedTag;
using ops::HWY_NAMESPACE::SignedVec;
using ops::HWY_NAMESPACE::StoreCodes;
using ops::HWY_NAMESPACE::StoreFloat;

constexpr std::int64_t kBlock = 32;  // of MXFP8

// A vector of n < kLanes elements, padded with zeros.
template <class T>
struct Tail {
  HWY_ALIGN T values[kLanes] = {};
  Tail() = default;
  Tail(const T* from, std::int64_t n) {
    for (std::int64_t j = 0; j < n; ++j) values[j] = from[j];
  }
  void CopyTo(T* to, std::int64_t n) const {
    for (std::int64_t j = 0; j < n; ++j) to[j] = values[j];
  }
};

HWY_INLINE SignedVec LoadMagnitudes(const std::uint32_t* from) {
  return hn::LoadU(SignedTag(), reinterpret_cast<const std::int32_t*>(from));
}

template <class T>
std::uint32_t RowMax(const T* x, std::int64_t n) {
  SignedVec largest = hn::Zero(SignedTag());
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) largest = hn::Max(largest, Magnitude(LoadFloat(x + j)));
  if (j < n) {
    largest = hn::Max(largest, Magnitude(LoadFloat(Tail<T>(x + j, n - j).values)));
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(SignedTag(), largest)));
}

template <class T>
void ColumnMax(const T* x, std::int64_t n, std::uint32_t* largest) {
  auto* to = reinterpret_cast<std::int32_t*>(largest);
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const SignedVec most = hn::Max(LoadMagnitudes(largest + j), Magnitude(LoadFloat(x + j)));
    hn::StoreU(most, SignedTag(), to + j);
  }
  for (; j < n; ++j) {
    const auto magnitude = std::bit_cast<std::uint32_t>(static_cast<float>(x[j])) & 0x7fffffffu;
    largest[j] = std::max(largest[j], magnitude);
  }
}

// MXFP8's codes for magnitudes that are not NaN.
template <class Q>
HWY_INLINE SignedVec ScaleCodes(SignedVec magnitude) {
  const FloatTag df;
  const SignedTag d;
  // fl32(1 / 448) and fl32(1 / 57344).
  const FloatVec t = hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 1.0f / Q::kMax));
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

template <class Q>
void ScalesRow(const std::uint32_t* magnitudes, std::int64_t n, std::uint8_t* codes,
               float* multipliers) {
  const FloatTag df;
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const SignedVec code = ScaleCodes<Q>(LoadMagnitudes(magnitudes + j));
    StoreCodes(code, codes + j);
    hn::StoreU(Multipliers(code), df, multipliers + j);
  }
  if (j < n) {
    const Tail<std::uint32_t> tail(magnitudes + j, n - j);
    const SignedVec code = ScaleCodes<Q>(LoadMagnitudes(tail.values));
    Tail<std::uint8_t> code_tail;
    Tail<float> multiplier_tail;
    StoreCodes(code, code_tail.values);
    hn::StoreU(Multipliers(code), df, multiplier_tail.values);
    code_tail.CopyTo(codes + j, n - j);
    multiplier_tail.CopyTo(multipliers + j, n - j);
  }
}

template <bool kFinite, class Q, class T>
HWY_INLINE void EncodeVector(const T* x, FloatVec multiplier, std::uint8_t* codes) {
  const FloatVec v = hn::Mul(LoadFloat(x), multiplier);
  if constexpr (kFinite) {
    StoreCodes(EncodeFinite<Q>(v), codes);
  } else {
    StoreCodes(Encode<Q>(v), codes);
  }
}

// multiplier(j) is the vector of column j.
template <bool kFinite, class Q, class T, class F>
HWY_INLINE void EncodeWith(const T* x, std::int64_t n, F&& multiplier, std::uint8_t* codes) {
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    EncodeVector<kFinite, Q>(x + j, multiplier(j, kLanes), codes + j);
  }
  if (j < n) {
    const Tail<T> tail(x + j, n - j);
    Tail<std::uint8_t> code_tail;
    EncodeVector<kFinite, Q>(tail.values, multiplier(j, n - j), code_tail.values);
    code_tail.CopyTo(codes + j, n - j);
  }
}

template <class Q, class T>
void EncodeByColumn(const T* x, std::int64_t n, const float* multipliers, bool finite,
                    std::uint8_t* codes) {
  const auto load = [multipliers](std::int64_t j, std::int64_t count) HWY_ATTR {
    return count == kLanes ? hn::LoadU(FloatTag(), multipliers + j)
                           : hn::LoadU(FloatTag(), Tail<float>(multipliers + j, count).values);
  };
  if (finite) {
    EncodeWith<true, Q>(x, n, load, codes);
  } else {
    EncodeWith<false, Q>(x, n, load, codes);
  }
}

template <class Q, class T>
void EncodeByOne(const T* x, std::int64_t n, float multiplier, std::uint8_t* codes) {
  const FloatVec by = hn::Set(FloatTag(), multiplier);
  EncodeWith<false, Q>(
      x, n, [by](std::int64_t, std::int64_t) HWY_ATTR { return by; }, codes);
}

// A block with NaN or Inf, or one that is not whole.
template <class Q, class T>
HWY_NOINLINE void QuantizeAnyBlock(const T* x, std::int64_t n, std::uint8_t* codes,
                                   std::uint8_t* scale) {
  std::uint32_t largest = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x[j])) & 0x7fffffffu;
    if (bits <= kInfMagnitude) largest = std::max(largest, bits);
  }
  const SignedVec code = ScaleCodes<Q>(hn::Set(SignedTag(), static_cast<std::int32_t>(largest)));
  *scale = static_cast<std::uint8_t>(hn::GetLane(code));
  EncodeByOne<Q>(x, n, hn::GetLane(Multipliers(code)), codes);
}

template <class Q, class T>
void RowMxfp8(const T* x, std::int64_t n, std::uint8_t* codes, std::uint8_t* scales) {
  const SignedTag d;
  constexpr std::int64_t kVectors = kBlock / kLanes;
  std::int64_t j = 0;
  for (; j + kBlock <= n; j += kBlock, ++scales) {
    SignedVec largest = Magnitude(LoadFloat(x + j));
    for (std::int64_t v = 1; v < kVectors; ++v) {
      largest = hn::Max(largest, Magnitude(LoadFloat(x + j + v * kLanes)));
    }
    largest = hn::MaxOfLanes(d, largest);  // in every lane
    if (HWY_UNLIKELY(static_cast<std::uint32_t>(hn::GetLane(largest)) >= kInfMagnitude)) {
      QuantizeAnyBlock<Q>(x + j, kBlock, codes + j, scales);
      continue;
    }
    const SignedVec code = ScaleCodes<Q>(largest);
    const FloatVec multiplier = Multipliers(code);
    *scales = static_cast<std::uint8_t>(hn::GetLane(code));
    for (std::int64_t v = 0; v < kVectors; ++v) {
      EncodeVector<true, Q>(x + j + v * kLanes, multiplier, codes + j + v * kLanes);
    }
  }
  if (j < n) QuantizeAnyBlock<Q>(x + j, n - j, codes + j, scales);
}

// f32 that are bf16 values.
HWY_INLINE void StoreExact(FloatVec v, bf16* to) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto high = hn::ShiftRight<16>(hn::BitCast(du, v));
#if HWY_TARGET == HWY_SCALAR
  to->bits = static_cast<std::uint16_t>(hn::GetLane(high));
#else
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(SignedTag(), high)), d16,
             reinterpret_cast<std::uint16_t*>(to));
#endif
}

enum class Store { kExact, kRound, kAdd };

template <Store kStore, class T>
HWY_INLINE void StoreDecoded(FloatVec v, T* to) {
  if constexpr (kStore == Store::kExact) {
    StoreExact(v, to);
  } else if constexpr (kStore == Store::kAdd) {
    StoreFloat(hn::Add(LoadFloat(to), v), to);
  } else {
    StoreFloat(v, to);
  }
}

template <class Q, Store kStore, class T>
void DecodeBlock(const std::uint8_t* codes, std::int64_t n, FloatVec scale, T* to) {
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    StoreDecoded<kStore>(hn::Mul(Decode<Q>(codes + j), scale), to + j);
  }
  if (j < n) {
    const Tail<std::uint8_t> tail(codes + j, n - j);
    Tail<T> to_tail(to + j, n - j);
    StoreDecoded<kStore>(hn::Mul(Decode<Q>(tail.values), scale), to_tail.values);
    to_tail.CopyTo(to + j, n - j);
  }
}

template <class Q, Store kStore, class T>
void DecodeAny(const std::uint8_t* codes, std::int64_t n, const float* scales, std::int64_t block,
               T* to) {
  const FloatTag d;
  if (block > 1) {
    for (std::int64_t j = 0; j < n; j += block, ++scales) {
      DecodeBlock<Q, kStore>(codes + j, std::min(block, n - j), hn::Set(d, *scales), to + j);
    }
    return;
  }
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    StoreDecoded<kStore>(hn::Mul(Decode<Q>(codes + j), hn::LoadU(d, scales + j)), to + j);
  }
  for (; j < n; ++j) DecodeBlock<Q, kStore>(codes + j, 1, hn::Set(d, scales[j]), to + j);
}

void ScaleValues(const std::uint8_t* codes, std::int64_t n, float* to) {
  for (std::int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(e8m0::FromBits(codes[j]));
}

// Entry points of one instruction set: the format becomes a type.
template <class F>
HWY_INLINE void WithFormat(DType format, F&& f) {
  if (format == DType::kE4M3) {
    f(TypeTag<e4m3>());
  } else {
    f(TypeTag<e5m2>());
  }
}

std::uint32_t RowMaxF32(const float* x, std::int64_t n) {
  return RowMax(x, n);
}
std::uint32_t RowMaxBF16(const bf16* x, std::int64_t n) {
  return RowMax(x, n);
}
void ColumnMaxF32(const float* x, std::int64_t n, std::uint32_t* to) {
  ColumnMax(x, n, to);
}
void ColumnMaxBF16(const bf16* x, std::int64_t n, std::uint32_t* to) {
  ColumnMax(x, n, to);
}
void ScalesAny(const std::uint32_t* magnitudes, std::int64_t n, DType format, std::uint8_t* codes,
               float* multipliers) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    ScalesRow<typename decltype(q)::type>(magnitudes, n, codes, multipliers);
  });
}
template <class T>
void EncodeColumns(const T* x, std::int64_t n, DType format, const float* multipliers, bool finite,
                   std::uint8_t* codes) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    EncodeByColumn<typename decltype(q)::type>(x, n, multipliers, finite, codes);
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
template <Store kStore, class T>
void DecodeFormat(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                  std::int64_t block, T* to) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    DecodeAny<typename decltype(q)::type, kStore>(codes, n, scales, block, to);
  });
}

void EncodeColumnsF32(const float* x, std::int64_t n, DType format, const float* multipliers,
                      bool finite, std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, finite, codes);
}
void EncodeColumnsBF16(const bf16* x, std::int64_t n, DType format, const float* multipliers,
                       bool finite, std::uint8_t* codes) {
  EncodeColumns(x, n, format, multipliers, finite, codes);
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
void DecodeF32(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, float* to) {
  if (accumulate) return DecodeFormat<Store::kAdd>(codes, n, format, scales, block, to);
  DecodeFormat<Store::kRound>(codes, n, format, scales, block, to);
}
void DecodeBF16(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                std::int64_t block, bool accumulate, bf16* to) {
  if (accumulate) return DecodeFormat<Store::kAdd>(codes, n, format, scales, block, to);
  DecodeFormat<Store::kRound>(codes, n, format, scales, block, to);
}
void DecodeExact(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                 std::int64_t block, bf16* to) {
  DecodeFormat<Store::kExact>(codes, n, format, scales, block, to);
}

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
HWY_EXPORT(ScalesAny);
HWY_EXPORT(EncodeColumnsF32);
HWY_EXPORT(EncodeColumnsBF16);
HWY_EXPORT(EncodeOneF32);
HWY_EXPORT(EncodeOneBF16);
HWY_EXPORT(RowBlocksF32);
HWY_EXPORT(RowBlocksBF16);
HWY_EXPORT(DecodeF32);
HWY_EXPORT(DecodeBF16);
HWY_EXPORT(DecodeExact);
HWY_EXPORT(ScaleValues);

}  // namespace

std::uint32_t MaxMagnitude(const float* x, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RowMaxF32)(x, n);
}
std::uint32_t MaxMagnitude(const bf16* x, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(RowMaxBF16)(x, n);
}
void MaxMagnitudes(const float* x, std::int64_t n, std::uint32_t* largest) {
  HWY_DYNAMIC_DISPATCH(ColumnMaxF32)(x, n, largest);
}
void MaxMagnitudes(const bf16* x, std::int64_t n, std::uint32_t* largest) {
  HWY_DYNAMIC_DISPATCH(ColumnMaxBF16)(x, n, largest);
}
void Mxfp8Scales(const std::uint32_t* magnitudes, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers) {
  HWY_DYNAMIC_DISPATCH(ScalesAny)(magnitudes, n, format, codes, multipliers);
}
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsF32)(x, n, format, multipliers, finite, codes);
}
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(EncodeColumnsBF16)(x, n, format, multipliers, finite, codes);
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
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, float* to) {
  HWY_DYNAMIC_DISPATCH(DecodeF32)(codes, n, format, scales, block, accumulate, to);
}
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, bf16* to) {
  HWY_DYNAMIC_DISPATCH(DecodeBF16)(codes, n, format, scales, block, accumulate, to);
}
void DecodeRowExact(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                    std::int64_t block, bf16* to) {
  HWY_DYNAMIC_DISPATCH(DecodeExact)(codes, n, format, scales, block, to);
}
void DecodeScales(const std::uint8_t* codes, std::int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(ScaleValues)(codes, n, to);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
