#include "cistron/ops/quantize/copy_decoder.h"
#include "cistron/ops/quantize/decode_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>

#include "cistron/base/threads.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kMaxScales = 1024;      // decoded at a time
constexpr std::int64_t kScaleGrain = 1 << 16;  // scales a thread looks at, at least

void Include(CopyDecoder::Range& range, int exponent) {
  range.min_exponent = std::min(range.min_exponent, exponent);
  range.max_exponent = std::max(range.max_exponent, exponent);
}

}  // namespace

CopyDecoder::CopyDecoder(std::string_view op, const QuantizedTensor& q, Direction direction)
    : CopyDecoder(MakeBlockGrid(op, q, direction), q.copy(direction), q.layout.format) {}

CopyDecoder::CopyDecoder(BlockGrid grid, const QuantizedCopy& copy, DType format)
    : grid_(std::move(grid)), copy_(copy), format_(format) {}

const std::uint8_t* CopyDecoder::Codes() const {
  return static_cast<const std::uint8_t*>(copy_.codes.raw());
}

// Calls f(codes, n, scales, block, to) for runs of a row that lie in one part and begin where a
// block does, or do not leave the block that they begin in.
template <class T, class F>
void CopyDecoder::ForRuns(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
                          std::int64_t col_end, T* to, std::int64_t stride, F&& f) const {
  const bool e8 = copy_.scales.dtype() == DType::kE8M0;
  const std::int64_t block = grid_.block_cols == 0 ? grid_.cols : grid_.block_cols;
  std::array<float, kMaxScales> scales;
  auto segment = std::upper_bound(grid_.segments.begin(), grid_.segments.end(), row_begin,
                                  [](std::int64_t r, const BlockSegment& s) { return r < s.end; });
  while (row_begin < row_end) {
    const std::int64_t rows_end = std::min(row_end, segment->end);
    for (std::int64_t c = col_begin; c < col_end;) {
      const std::int64_t part_end =
          grid_.block_cols == 0 ? grid_.cols : (c / grid_.part_cols + 1) * grid_.part_cols;
      const std::int64_t into =
          grid_.block_cols == 0 ? 0 : (c % grid_.part_cols) % grid_.block_cols;
      const std::int64_t end =
          std::min({col_end, part_end, into > 0 ? c + block - into : c + kMaxScales * block});
      const std::int64_t first = grid_.ScaleCol(c), count = grid_.ScaleCol(end - 1) - first + 1;
      std::int64_t held = -1;  // the row of scales in `scales`
      for (std::int64_t r = row_begin; r < rows_end; ++r) {
        if (const std::int64_t row = grid_.ScaleRow(*segment, r); row != held) {
          const std::int64_t at = row * grid_.scale_cols + first;
          if (e8) {
            DecodeScales(static_cast<const std::uint8_t*>(copy_.scales.raw()) + at, count,
                         scales.data());
          } else {
            std::copy_n(copy_.scales.data<float>() + at, count, scales.data());
          }
          held = row;
        }
        f(Codes() + r * grid_.cols + c, end - c, scales.data(), into > 0 ? end - c : block,
          to + (r - row_begin) * stride + (c - col_begin));
      }
      c = end;
    }
    to += (rows_end - row_begin) * stride;
    row_begin = rows_end;
    ++segment;
  }
}

template <class T>
void CopyDecoder::Decode(std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin,
                         std::int64_t col_end, bool accumulate, T* to, std::int64_t stride) const {
  ForRuns(row_begin, row_end, col_begin, col_end, to, stride,
          [&](const std::uint8_t* codes, std::int64_t n, const float* scales, std::int64_t block,
              T* out) { DecodeRow(codes, n, format_, scales, block, accumulate, out); });
}

template <class T>
void CopyDecoder::DecodeExact(DecodeScale scale, std::int64_t row_begin, std::int64_t row_end,
                              std::int64_t col_begin, std::int64_t col_end, T* to,
                              std::int64_t stride) const {
  const auto run = [this](const std::uint8_t* codes, std::int64_t n, const float* scales,
                          std::int64_t block, T* out) {
    if constexpr (std::is_same_v<T, float>) {
      DecodeRow(codes, n, format_, scales, block, false, out);
    } else {
      DecodeRowExact(codes, n, format_, scales, block, out);
    }
  };
  if (scale == DecodeScale::kApply) {
    return ForRuns(row_begin, row_end, col_begin, col_end, to, stride, run);
  }
  const float one = 1.0f;
  const std::int64_t n = col_end - col_begin;
  if (n == 0) return;
  for (std::int64_t r = row_begin; r < row_end; ++r) {
    run(Codes() + r * grid_.cols + col_begin, n, &one, n, to + (r - row_begin) * stride);
  }
}

template void CopyDecoder::Decode(std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                                  float*, std::int64_t) const;
template void CopyDecoder::Decode(std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                                  bf16*, std::int64_t) const;
template void CopyDecoder::DecodeExact(DecodeScale, std::int64_t, std::int64_t, std::int64_t,
                                       std::int64_t, float*, std::int64_t) const;
template void CopyDecoder::DecodeExact(DecodeScale, std::int64_t, std::int64_t, std::int64_t,
                                       std::int64_t, bf16*, std::int64_t) const;

// Every code of the block is ±0.
bool CopyDecoder::IsZero(std::int64_t scale_row, std::int64_t scale_col) const {
  const auto segment =
      std::upper_bound(grid_.segments.begin(), grid_.segments.end(), scale_row,
                       [](std::int64_t row, const BlockSegment& s) { return row < s.scale_row; }) -
      1;
  const std::int64_t row = segment->begin + (scale_row - segment->scale_row) * grid_.block_rows;
  const std::int64_t row_end = std::min(row + grid_.block_rows, segment->end);
  const std::int64_t blocks = (grid_.part_cols + grid_.block_cols - 1) / grid_.block_cols;
  const std::int64_t part = scale_col / blocks;
  const std::int64_t col = part * grid_.part_cols + scale_col % blocks * grid_.block_cols;
  const std::int64_t col_end = std::min(col + grid_.block_cols, (part + 1) * grid_.part_cols);
  for (std::int64_t r = row; r < row_end; ++r) {
    for (std::int64_t c = col; c < col_end; ++c) {
      if ((Codes()[r * grid_.cols + c] & 0x7f) != 0) return false;
    }
  }
  return true;
}

CopyDecoder::Range CopyDecoder::ScaleRange(int lowest) const {
  Range all;
  if (grid_.segments.empty() || grid_.block_rows == 0) return all;
  const BlockSegment& last = grid_.segments.back();
  const std::int64_t scale_rows =
      last.scale_row + (last.end - last.begin + grid_.block_rows - 1) / grid_.block_rows;
  std::mutex mutex;
  ParallelChunks(
      scale_rows, 1 + kScaleGrain / (grid_.scale_cols + 1),
      [&](std::int64_t begin, std::int64_t end, int) {
        Range range;
        if (copy_.scales.dtype() == DType::kE8M0) {
          const auto* codes = static_cast<const std::uint8_t*>(copy_.scales.raw());
          const auto [low, high, any_low] =
              ScaleCodeRange(codes + begin * grid_.scale_cols, (end - begin) * grid_.scale_cols,
                             static_cast<std::uint8_t>(lowest + 127));
          if (low <= high) {
            Include(range, low - 127);
            Include(range, high - 127);
          }
          for (std::int64_t i = begin * grid_.scale_cols; any_low && i < end * grid_.scale_cols;
               ++i) {
            if (codes[i] >= lowest + 127) continue;
            if (!IsZero(i / grid_.scale_cols, i % grid_.scale_cols)) Include(range, codes[i] - 127);
          }
        } else {
          for (std::int64_t i = begin * grid_.scale_cols; i < end * grid_.scale_cols; ++i) {
            const auto bits = std::bit_cast<std::uint32_t>(copy_.scales.data<float>()[i]);
            if ((bits & 0x807fffffu) != 0) range.powers_of_two = false;
            Include(range, static_cast<int>(bits >> 23 & 0xffu) - 127);
          }
        }
        const std::lock_guard lock(mutex);
        all.powers_of_two = all.powers_of_two && range.powers_of_two;
        all.min_exponent = std::min(all.min_exponent, range.min_exponent);
        all.max_exponent = std::max(all.max_exponent, range.max_exponent);
      });
  return all;
}

}  // namespace cistron::ops::internal
