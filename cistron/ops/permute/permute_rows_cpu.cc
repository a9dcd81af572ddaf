// Vector kernels of permute, compiled once for each instruction set.
#include "cistron/ops/permute/permute_rows.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/permute/permute_rows_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using ops::HWY_NAMESPACE::FloatTag;
using ops::HWY_NAMESPACE::FloatVec;
using ops::HWY_NAMESPACE::ForEach;
using ops::HWY_NAMESPACE::kLanes;
using ops::HWY_NAMESPACE::LoadFloats;
using ops::HWY_NAMESPACE::StoreFloats;

constexpr int kVectors = 2;
constexpr std::int64_t kBlock = kVectors * kLanes;

template <class T>
HWY_INLINE void Store(float value, bool accumulate, T* to) {
  *to = T(accumulate ? static_cast<float>(*to) + value : value);
}

// The hardware cannot foresee which row comes next.
template <class T>
HWY_INLINE void PrefetchRow(const T* row, std::int64_t width) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t j = 0; j < width; j += kLine) __builtin_prefetch(row + j);
}

// A row is too short for the call of a library to cost nothing.
HWY_INLINE void CopyBytes(const std::uint8_t* HWY_RESTRICT from, std::int64_t bytes,
                          std::uint8_t* HWY_RESTRICT to) {
  const hn::ScalableTag<std::uint8_t> d;
  constexpr auto kBytes = static_cast<std::int64_t>(hn::MaxLanes(d));
  std::int64_t i = 0;
  for (; i + 4 * kBytes <= bytes; i += 4 * kBytes) {
    const auto v0 = hn::LoadU(d, from + i), v1 = hn::LoadU(d, from + i + kBytes);
    const auto v2 = hn::LoadU(d, from + i + 2 * kBytes), v3 = hn::LoadU(d, from + i + 3 * kBytes);
    hn::StoreU(v0, d, to + i);
    hn::StoreU(v1, d, to + i + kBytes);
    hn::StoreU(v2, d, to + i + 2 * kBytes);
    hn::StoreU(v3, d, to + i + 3 * kBytes);
  }
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

template <class T>
void Permute(const PermuteArgs<T>& args, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kRowsAhead = 3;
  for (std::int64_t r = begin; r < end; ++r) {
    if (r + kRowsAhead < end) {
      PrefetchRow(args.x + args.slot_of_row[r + kRowsAhead] / args.top_k * args.x_stride,
                  args.width);
    }
    const T* from = args.x + args.slot_of_row[r] / args.top_k * args.x_stride;
    T* to = args.rows + r * args.rows_stride;
    if (!args.accumulate) {
      CopyBytes(reinterpret_cast<const std::uint8_t*>(from),
                args.width * static_cast<std::int64_t>(sizeof(T)),
                reinterpret_cast<std::uint8_t*>(to));
      continue;
    }
    std::int64_t j = 0;
    for (; j + kBlock <= args.width; j += kBlock) {
      FloatVec v[kVectors];
      LoadFloats(from + j, v);
      StoreFloats(v, true, to + j);
    }
    for (; j < args.width; ++j) Store(static_cast<float>(from[j]), true, to + j);
  }
}

template <class T>
void Unpermute(const UnpermuteArgs<T>& args, std::int64_t begin, std::int64_t end) {
  const FloatTag d;
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int32_t* rows = args.row_of_slot + t * args.top_k;
    for (std::int64_t k = 0; t + 1 < end && k < args.top_k; ++k) {
      const std::int32_t next = rows[args.top_k + k];
      if (next >= 0) PrefetchRow(args.rows + next * args.rows_stride, args.width);
    }
    const float* probs = args.probs == nullptr ? nullptr : args.probs + t * args.top_k;
    T* y = args.y + t * args.y_stride;
    std::int64_t j = 0;
    for (; j + kBlock <= args.width; j += kBlock) {
      FloatVec sum[kVectors];
      ForEach<kVectors>([&](int i) { sum[i] = hn::Zero(d); });
      for (std::int64_t k = 0; k < args.top_k; ++k) {
        if (rows[k] < 0) continue;
        const FloatVec prob = hn::Set(d, probs == nullptr ? 1.0f : probs[k]);  // 1·v is exact
        FloatVec v[kVectors];
        LoadFloats(args.rows + rows[k] * args.rows_stride + j, v);
        ForEach<kVectors>([&](int i) { sum[i] = hn::MulAdd(prob, v[i], sum[i]); });
      }
      StoreFloats(sum, args.accumulate, y + j);
    }
    for (; j < args.width; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < args.top_k; ++k) {
        if (rows[k] < 0) continue;
        const float v = static_cast<float>(args.rows[rows[k] * args.rows_stride + j]);
        sum += probs == nullptr ? v : probs[k] * v;
      }
      Store(sum, args.accumulate, y + j);
    }
  }
}

// drow = prob · dy; returns ⟨dy, row⟩ where row is given, else 0.
template <class T>
HWY_INLINE float BackwardRow(const T* HWY_RESTRICT dy, const T* HWY_RESTRICT row, float prob,
                             std::int64_t width, bool accumulate, T* HWY_RESTRICT drow) {
  const FloatTag d;
  const FloatVec prob_v = hn::Set(d, prob);
  FloatVec dot[kVectors];
  ForEach<kVectors>([&](int i) { dot[i] = hn::Zero(d); });
  float tail = 0;
  std::int64_t j = 0;
  for (; j + kBlock <= width; j += kBlock) {
    FloatVec dout[kVectors];
    LoadFloats(dy + j, dout);
    if (row != nullptr) {
      FloatVec v[kVectors];
      LoadFloats(row + j, v);
      ForEach<kVectors>([&](int i) { dot[i] = hn::MulAdd(dout[i], v[i], dot[i]); });
    }
    ForEach<kVectors>([&](int i) { dout[i] = hn::Mul(prob_v, dout[i]); });
    StoreFloats(dout, accumulate, drow + j);
  }
  for (; j < width; ++j) {
    const float dout = static_cast<float>(dy[j]);
    if (row != nullptr) tail += dout * static_cast<float>(row[j]);
    Store(prob * dout, accumulate, drow + j);
  }
  static_assert(kVectors == 2);
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(dot[0], dot[1]))) + tail;
}

template <class T>
void UnpermuteBackward(const UnpermuteBackwardArgs<T>& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t slot = begin * args.top_k; slot < end * args.top_k; ++slot) {
    const std::int64_t r = args.row_of_slot[slot];
    float dprob = 0;
    if (r >= 0) {
      dprob = BackwardRow(args.dy + slot / args.top_k * args.dy_stride,
                          args.dprobs == nullptr ? nullptr : args.rows + r * args.rows_stride,
                          args.probs == nullptr ? 1.0f : args.probs[slot], args.width,
                          args.accumulate_drows, args.drows + r * args.drows_stride);
    }
    if (args.dprobs != nullptr) Store(dprob, args.accumulate_dprobs, args.dprobs + slot);
  }
}

void PermuteF32(const PermuteArgs<float>& args, std::int64_t begin, std::int64_t end) {
  Permute(args, begin, end);
}
void PermuteBF16(const PermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  Permute(args, begin, end);
}
void UnpermuteF32(const UnpermuteArgs<float>& args, std::int64_t begin, std::int64_t end) {
  Unpermute(args, begin, end);
}
void UnpermuteBF16(const UnpermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  Unpermute(args, begin, end);
}
void UnpermuteBackwardF32(const UnpermuteBackwardArgs<float>& args, std::int64_t begin,
                          std::int64_t end) {
  UnpermuteBackward(args, begin, end);
}
void UnpermuteBackwardBF16(const UnpermuteBackwardArgs<bf16>& args, std::int64_t begin,
                           std::int64_t end) {
  UnpermuteBackward(args, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(PermuteF32);
HWY_EXPORT(PermuteBF16);
HWY_EXPORT(UnpermuteF32);
HWY_EXPORT(UnpermuteBF16);
HWY_EXPORT(UnpermuteBackwardF32);
HWY_EXPORT(UnpermuteBackwardBF16);

}  // namespace

void PermuteRange(const PermuteArgs<float>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(PermuteF32)(args, begin, end);
}
void PermuteRange(const PermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(PermuteBF16)(args, begin, end);
}
void UnpermuteRange(const UnpermuteArgs<float>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(UnpermuteF32)(args, begin, end);
}
void UnpermuteRange(const UnpermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(UnpermuteBF16)(args, begin, end);
}
void UnpermuteBackwardRange(const UnpermuteBackwardArgs<float>& args, std::int64_t begin,
                            std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(UnpermuteBackwardF32)(args, begin, end);
}
void UnpermuteBackwardRange(const UnpermuteBackwardArgs<bf16>& args, std::int64_t begin,
                            std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(UnpermuteBackwardBF16)(args, begin, end);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
