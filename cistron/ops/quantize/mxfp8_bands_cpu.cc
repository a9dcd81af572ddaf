// Kernels of mxfp8_bands.h, compiled once for each instruction set.
//
// A band is cut into strips of 32 columns. All largest magnitudes of a strip are found in one pass
// and its codes made in a second, while it lies in the first-level cache.
#include "cistron/ops/quantize/mxfp8_bands.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/quantize/mxfp8_bands_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/quantize/mxfp8-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops::internal {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace ops::HWY_NAMESPACE;  // NOLINT: the vector helpers of this instruction set

// What will be read and written after this band: the one below, as a rule. Its memory is asked for
// row by row, in as many steps as this band has rows of strips; strips would be short pieces of 32
// rows at a time, which no processor fetches well.
template <class T>
class Lookahead {
 public:
  Lookahead(const Band<T>& band, const BandCopy& rowwise, const BandCopy& columnwise)
      : x_(band.x, band.stride, band), codes_(columnwise.codes, columnwise.stride, band) {
    if (rowwise.codes != nullptr) row_codes_ = {rowwise.codes, rowwise.stride, band};
  }

  // Asks for the next 32 values and, with kRows, for two rows of codes.
  template <bool kRows>
  HWY_INLINE void Step() {
    x_.Step();
    codes_.Step();
    if constexpr (kRows) row_codes_.Step();
  }

 private:
  template <class V>
  struct Rows {
    const V* at = nullptr;
    std::int64_t cols = 0, gap = 0, left = 0;
    Rows() = default;
    Rows(const V* band, std::int64_t stride, const Band<T>& shape)
        : at(band + shape.rows * stride),
          cols(shape.cols / kMxBlock * kMxBlock),
          gap(stride - cols),
          left(cols) {}
    HWY_INLINE void Step() {
      constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(V));
      for (std::int64_t j = 0; j < kMxBlock; j += kLine) __builtin_prefetch(at + j, 0, 2);
      at += kMxBlock;
      left -= kMxBlock;
      if (left == 0) {
        at += gap;
        left = cols;
      }
    }
  };
  Rows<T> x_;
  Rows<std::uint8_t> codes_, row_codes_;
};

// A strip of at most 32 × 32 values of any kind.
template <class Q, class T>
HWY_NOINLINE void AnyStrip(const Band<T>& strip, bool square, const BandCopy& rowwise,
                           const BandCopy& columnwise) {
  if (rowwise.codes != nullptr) {
    for (std::int64_t r = 0; r < strip.rows; ++r) {
      AnyBlock<Q>(strip.x + r * strip.stride, strip.cols, rowwise.codes + r * rowwise.stride,
                  rowwise.scales + r * rowwise.scale_stride);
    }
  }
  T values[kMxBlock];
  std::uint8_t codes[kMxBlock];
  if (!square) {
    for (std::int64_t c = 0; c < strip.cols; ++c) {
      for (std::int64_t r = 0; r < strip.rows; ++r) values[r] = strip.x[r * strip.stride + c];
      AnyBlock<Q>(values, strip.rows, codes, columnwise.scales + c);
      for (std::int64_t r = 0; r < strip.rows; ++r) {
        columnwise.codes[r * columnwise.stride + c] = codes[r];
      }
    }
    return;
  }
  // Each row is a block of its own values and the strip's largest one.
  std::uint32_t largest = 0;
  for (std::int64_t r = 0; r < strip.rows; ++r) {
    for (std::int64_t c = 0; c < strip.cols; ++c) {
      const std::uint32_t bits = MagnitudeOf(strip.x[r * strip.stride + c]);
      if (bits <= static_cast<std::uint32_t>(kNanAbove)) largest = std::max(largest, bits);
    }
  }
  const T most(std::bit_cast<float>(largest));
  T row[kMxBlock + 1];
  std::uint8_t row_codes[kMxBlock + 1];
  for (std::int64_t r = 0; r < strip.rows; ++r) {
    std::copy_n(strip.x + r * strip.stride, strip.cols, row);
    row[strip.cols] = most;
    AnyBlock<Q>(row, strip.cols + 1, row_codes, columnwise.scales);
    std::copy_n(row_codes, strip.cols, columnwise.codes + r * columnwise.stride);
  }
}

#if HWY_TARGET != HWY_SCALAR
constexpr std::int64_t kPairs = kMxBlock / kPair;  // in the width of a strip
static_assert(kMxBlock % kPair == 0);

// The largest magnitudes of a strip.
template <class T>
struct StripMaxima {
  // Of rows as f32's, zeros beyond the rows; of columns as they lie in memory.
  HWY_ALIGN std::int32_t rows[kMxBlock];
  HWY_ALIGN hn::TFromD<BitsTag<T>> columns[kMxBlock];
};

template <class T>
HWY_INLINE void FindMaxima(const T* x, std::int64_t stride, std::int64_t rows,
                           StripMaxima<T>& maxima) {
  const BitsTag<T> d;
  const hn::Full128<std::int32_t> d4;
  constexpr int kVectors = static_cast<int>(kMxBlock / kBitsLanes<T>);
  HWY_ALIGN std::int32_t candidates[4 * kMxBlock];
  BitsVec<T> columns[kVectors];
  ForEach<kVectors>([&](int i) HWY_ATTR { columns[i] = hn::Zero(d); });
  for (std::int64_t r = 0; r < rows; ++r) {
    BitsVec<T> row = hn::Zero(d);
    ForEach<kVectors>([&](int i) HWY_ATTR {
      const BitsVec<T> magnitude = LoadMagnitude(x + r * stride + i * kBitsLanes<T>);
      columns[i] = hn::Max(columns[i], magnitude);
      row = hn::Max(row, magnitude);
    });
    hn::Store(hn::BitCast(d4, MaxTo128(d, row)), d4, candidates + 4 * r);
  }
  ForEach<kVectors>([&](int i)
                        HWY_ATTR { hn::Store(columns[i], d, maxima.columns + i * kBitsLanes<T>); });
  const std::int64_t padded = (rows + 3) / 4 * 4;
  std::fill(candidates + 4 * rows, candidates + 4 * padded, 0);
  for (std::int64_t r = 0; r < padded; r += 4) {
    const std::int32_t* at = candidates + 4 * r;
    hn::Store(MaxOfFour<T>(hn::Load(d4, at), hn::Load(d4, at + 4), hn::Load(d4, at + 8),
                           hn::Load(d4, at + 12)),
              d4, maxima.rows + r);
  }
  std::fill(maxima.rows + padded, maxima.rows + kMxBlock, 0);
}

// Whole width; rows and values of any number and size.
template <bool kRows, class Q, class T>
void QuantizeStrip(const Band<T>& strip, Lookahead<T>& next, bool square, const BandCopy& rowwise,
                   const BandCopy& columnwise) {
  const FloatTag df;
  const SignedTag d;
  StripMaxima<T> maxima;
  FindMaxima(strip.x, strip.stride, strip.rows, maxima);
  if (square) {
    const std::int32_t most = *std::max_element(maxima.rows, maxima.rows + kMxBlock);
    std::fill_n(maxima.columns, kMxBlock,
                static_cast<hn::TFromD<BitsTag<T>>>(sizeof(T) == 2 ? most >> 16 : most));
  }
  HWY_ALIGN std::int32_t row_lowest[kMxBlock], row_offset[kMxBlock];
  HWY_ALIGN std::uint8_t row_scales[kMxBlock];
  auto uncommon = hn::Lt(hn::Zero(d), hn::Zero(d));
  if constexpr (kRows) {
    for (std::int64_t r = 0; r < kMxBlock; r += kLanes) {
      const SignedVec magnitudes = hn::Load(d, maxima.rows + r);
      uncommon = hn::Or(uncommon, IsUncommon(magnitudes));
      const SignedVec codes = ScaleCodes<Q>(hn::BitCast(df, magnitudes));
      const BlockConstants constants = ConstantsOf<Q>(codes);
      hn::Store(constants.lowest, d, row_lowest + r);
      hn::Store(constants.offset, d, row_offset + r);
      StoreCodes(codes, row_scales + r);
    }
  }
  BlockConstants columns[2 * kPairs];
  HWY_ALIGN std::uint8_t column_scales[kMxBlock];
  for (std::int64_t p = 0; p < kPairs; ++p) {
    const ElementPair<T> largest(reinterpret_cast<const T*>(maxima.columns) + p * kPair);
    SignedVec codes[2];
    ForEach<2>([&](int i) HWY_ATTR {
      uncommon = hn::Or(uncommon, IsUncommon(largest.magnitude[i]));
      codes[i] = ScaleCodes<Q>(hn::BitCast(df, largest.magnitude[i]));
      columns[2 * p + i] = ConstantsOf<Q>(codes[i]);
    });
    StoreCodePair<T>(codes, column_scales + p * kPair);
  }
  if (HWY_UNLIKELY(!hn::AllFalse(d, uncommon))) {
    return AnyStrip<Q>(strip, square, rowwise, columnwise);
  }
  if constexpr (kRows) {
    for (std::int64_t r = 0; r < strip.rows; ++r) {
      rowwise.scales[r * rowwise.scale_stride] = row_scales[r];
    }
  }
  std::copy_n(column_scales, square ? 1 : kMxBlock, columnwise.scales);
  for (std::int64_t p = 0; p < kPairs; ++p) {
    const BlockConstants c0 = columns[2 * p], c1 = columns[2 * p + 1];
    for (std::int64_t r = 0; r < strip.rows; ++r) {
      const ElementPair<T> x(strip.x + r * strip.stride + p * kPair);
      if (p == 0) next.template Step<kRows>();
      if constexpr (kRows) {
        const BlockConstants row{hn::Set(d, row_lowest[r]), hn::Set(d, row_offset[r])};
        EncodeInBlocks<Q>(x, row, row, rowwise.codes + r * rowwise.stride + p * kPair);
      }
      EncodeInBlocks<Q>(x, c0, c1, columnwise.codes + r * columnwise.stride + p * kPair);
    }
  }
}
#else
template <bool kRows, class Q, class T>
void QuantizeStrip(const Band<T>& strip, Lookahead<T>& /*next*/, bool square,
                   const BandCopy& rowwise, const BandCopy& columnwise) {
  AnyStrip<Q>(strip, square, rowwise, columnwise);
}
#endif

// The copy's part that belongs to the strip that begins at a column.
BandCopy From(const BandCopy& copy, std::int64_t col, std::int64_t scale) {
  if (copy.codes == nullptr) return copy;
  return {copy.codes + col, copy.stride, copy.scales + scale, copy.scale_stride};
}

// A strip that is not as wide as a block, by way of one that is: zeros do not change a scale.
template <bool kRows, class Q, class T>
HWY_NOINLINE void QuantizeNarrowStrip(const Band<T>& strip, bool square, const BandCopy& rowwise,
                                      const BandCopy& columnwise) {
  constexpr std::int64_t kValues = kMxBlock * kMxBlock;
  HWY_ALIGN T values[kValues] = {};
  HWY_ALIGN std::uint8_t row_codes[kValues], column_codes[kValues];
  std::uint8_t row_scales[kMxBlock], column_scales[kMxBlock];
  for (std::int64_t r = 0; r < strip.rows; ++r) {
    std::copy_n(strip.x + r * strip.stride, strip.cols, values + r * kMxBlock);
  }
  const Band<T> padded{values, kMxBlock, strip.rows, kMxBlock};
  Lookahead<T> next(padded, {row_codes, kMxBlock, row_scales, 1},
                    {column_codes, kMxBlock, column_scales, 0});
  QuantizeStrip<kRows, Q>(padded, next, square, {row_codes, kMxBlock, row_scales, 1},
                          {column_codes, kMxBlock, column_scales, 0});
  std::copy_n(column_scales, square ? 1 : strip.cols, columnwise.scales);
  for (std::int64_t r = 0; r < strip.rows; ++r) {
    std::copy_n(column_codes + r * kMxBlock, strip.cols, columnwise.codes + r * columnwise.stride);
    if constexpr (!kRows) continue;
    std::copy_n(row_codes + r * kMxBlock, strip.cols, rowwise.codes + r * rowwise.stride);
    rowwise.scales[r * rowwise.scale_stride] = row_scales[r];
  }
}

template <bool kRows, class Q, class T>
void QuantizeBand(const Band<T>& band, bool square, const BandCopy& rowwise,
                  const BandCopy& columnwise) {
  const std::int64_t whole = band.cols / kMxBlock;
  Lookahead<T> next(band, rowwise, columnwise);
  for (std::int64_t s = 0; s * kMxBlock < band.cols; ++s) {
    const std::int64_t col = s * kMxBlock;
    const Band<T> strip{band.x + col, band.stride, band.rows, std::min(kMxBlock, band.cols - col)};
    const BandCopy row = From(rowwise, col, s);
    const BandCopy column = From(columnwise, col, square ? s : col);
    if (s == whole) return QuantizeNarrowStrip<kRows, Q>(strip, square, row, column);
    QuantizeStrip<kRows, Q>(strip, next, square, row, column);
  }
}

// Entry points of one instruction set.
template <class T>
void AnyBand(const Band<T>& band, DType format, bool square, const BandCopy& rowwise,
             const BandCopy& columnwise) {
  WithFormat(format, [&](auto q) HWY_ATTR {
    using Q = typename decltype(q)::type;
    if (rowwise.codes == nullptr) {
      QuantizeBand<false, Q>(band, square, rowwise, columnwise);
    } else {
      QuantizeBand<true, Q>(band, square, rowwise, columnwise);
    }
  });
}
void BandF32(const Band<float>& band, DType format, bool square, const BandCopy& rowwise,
             const BandCopy& columnwise) {
  AnyBand(band, format, square, rowwise, columnwise);
}
void BandBF16(const Band<bf16>& band, DType format, bool square, const BandCopy& rowwise,
              const BandCopy& columnwise) {
  AnyBand(band, format, square, rowwise, columnwise);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops::internal
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops::internal {
namespace {

HWY_EXPORT(BandF32);
HWY_EXPORT(BandBF16);

}  // namespace

void QuantizeBandMxfp8(const Band<float>& band, DType format, bool square, const BandCopy& rowwise,
                       const BandCopy& columnwise) {
  HWY_DYNAMIC_DISPATCH(BandF32)(band, format, square, rowwise, columnwise);
}
void QuantizeBandMxfp8(const Band<bf16>& band, DType format, bool square, const BandCopy& rowwise,
                       const BandCopy& columnwise) {
  HWY_DYNAMIC_DISPATCH(BandBF16)(band, format, square, rowwise, columnwise);
}

}  // namespace cistron::ops::internal
#endif  // HWY_ONCE
