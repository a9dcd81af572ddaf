// Kernels of decode_rows.h, compiled once for each instruction set.
#include "cistron/ops/quantize/decode_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantize/decode_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/quantize/fp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::Decode;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloat;
using ops::HWY_NAMESPACE::SignedTag;
using ops::HWY_NAMESPACE::StoreFloat;
using ops::HWY_NAMESPACE::WithFormat;

template <class T>
using Tail = ops::HWY_NAMESPACE::Tail<T, kLanes>;

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

CodeRange RangeOfCodes(const std::uint8_t* codes, std::int64_t n, std::uint8_t lowest) {
  const hn::ScalableTag<std::uint8_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  CodeRange range{255, 0, false};
  const auto include = [&](std::uint8_t code) {
    if (code < lowest) {
      range.any_below = true;
    } else {
      range.low = std::min(range.low, code);
      range.high = std::max(range.high, code);
    }
  };
  std::int64_t j = 0;
  if (n >= lanes) {
    const auto bound = hn::Set(d, lowest);
    auto low = hn::Set(d, std::uint8_t{255}), least = low, high = hn::Zero(d);
    for (; j + lanes <= n; j += lanes) {
      const auto code = hn::LoadU(d, codes + j);
      // Codes below count as 255 for the smallest and do not matter for the largest.
      const auto at_least = hn::Eq(hn::Max(code, bound), code);
      low = hn::Min(low, hn::IfThenElse(at_least, code, hn::Set(d, std::uint8_t{255})));
      high = hn::Max(high, code);
      least = hn::Min(least, code);
    }
    HWY_ALIGN std::uint8_t lows[hn::MaxLanes(d)], highs[hn::MaxLanes(d)], leasts[hn::MaxLanes(d)];
    hn::Store(low, d, lows);
    hn::Store(high, d, highs);
    hn::Store(least, d, leasts);
    for (std::int64_t i = 0; i < lanes; ++i) {
      range.low = std::min(range.low, lows[i]);
      if (highs[i] >= lowest) range.high = std::max(range.high, highs[i]);
      range.any_below = range.any_below || leasts[i] < lowest;
    }
  }
  for (; j < n; ++j) include(codes[j]);
  return range;
}

template <Store kStore, class T>
void DecodeFormat(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                  std::int64_t block, T* to) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    DecodeAny<typename decltype(q)::type, kStore>(codes, n, scales, block, to);
  });
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(DecodeF32);
HWY_EXPORT(DecodeBF16);
HWY_EXPORT(DecodeExact);
HWY_EXPORT(RangeOfCodes);
HWY_EXPORT(ScaleValues);

}  // namespace

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
CodeRange ScaleCodeRange(const std::uint8_t* codes, std::int64_t n, std::uint8_t lowest) {
  return HWY_DYNAMIC_DISPATCH(RangeOfCodes)(codes, n, lowest);
}
void DecodeScales(const std::uint8_t* codes, std::int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(ScaleValues)(codes, n, to);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
