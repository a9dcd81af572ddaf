// Transposition by blocks of 4 x 4 in vector registers, compiled once for each instruction set.
#include "cistron/ops/gemm/transpose.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/gemm/transpose_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

void TransposeScalar(const float* from, std::int64_t from_stride, std::int64_t rows,
                     std::int64_t cols, float* to, std::int64_t to_stride) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

#if HWY_TARGET == HWY_SCALAR
void TransposeBlocks(const float* from, std::int64_t from_stride, std::int64_t rows,
                     std::int64_t cols, float* to, std::int64_t to_stride) {
  TransposeScalar(from, from_stride, rows, cols, to, to_stride);
}
#else
HWY_INLINE void Transpose4x4(const float* HWY_RESTRICT from, std::int64_t from_stride,
                             float* HWY_RESTRICT to, std::int64_t to_stride) {
  const hn::FixedTag<float, 4> d;
  const hn::RepartitionToWide<decltype(d)> pairs;
  const auto r0 = hn::LoadU(d, from);
  const auto r1 = hn::LoadU(d, from + from_stride);
  const auto r2 = hn::LoadU(d, from + 2 * from_stride);
  const auto r3 = hn::LoadU(d, from + 3 * from_stride);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * to_stride);
}

void TransposeBlocks(const float* from, std::int64_t from_stride, std::int64_t rows,
                     std::int64_t cols, float* to, std::int64_t to_stride) {
  // Sixteen rows at once fill whole cache lines of the result.
  constexpr std::int64_t kRows = 16;
  const std::int64_t whole_cols = cols / 4 * 4;
  std::int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    for (std::int64_t j = 0; j < whole_cols; j += 4) {
      for (std::int64_t r = 0; r < kRows; r += 4) {
        // Sixteen streams are too many for the hardware: each line of the next sixteen rows in
        // turn.
        __builtin_prefetch(from + (i + kRows + r + j / 4 % 4) * from_stride + j);
        Transpose4x4(from + (i + r) * from_stride + j, from_stride, to + j * to_stride + i + r,
                     to_stride);
      }
    }
  }
  TransposeScalar(from + whole_cols, from_stride, i, cols - whole_cols, to + whole_cols * to_stride,
                  to_stride);
  TransposeScalar(from + i * from_stride, from_stride, rows - i, cols, to + i, to_stride);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(TransposeBlocks);

}  // namespace

void TransposeF32(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t cols,
                  float* to, std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(TransposeBlocks)(from, from_stride, rows, cols, to, to_stride);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
