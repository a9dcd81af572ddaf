// MXFP8 copies of a band of rows, for quantize_cpu.cc.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

// Up to 32 rows, the height of a block; `stride` elements apart.
template <class T>
struct Band {
  const T* x = nullptr;
  std::int64_t stride = 0, rows = 0, cols = 0;
};

// Where codes and scales of a band go. Codes may be null for a row-wise copy that is not wanted.
struct BandCopy {
  std::uint8_t* codes = nullptr;
  std::int64_t stride = 0;         // of the codes
  std::uint8_t* scales = nullptr;  // row-wise a row of them for each row, otherwise one row
  std::int64_t scale_stride = 0;
};

// One scale for 32 values of a row in `rowwise`; for a column of the band in `columnwise`, or, with
// `square`, for 32 columns of it. Any values; blocks at the ends may be smaller.
void QuantizeBandMxfp8(const Band<float>& band, DType format, bool square, const BandCopy& rowwise,
                       const BandCopy& columnwise);
void QuantizeBandMxfp8(const Band<bf16>& band, DType format, bool square, const BandCopy& rowwise,
                       const BandCopy& columnwise);

}  // namespace cistron::ops::internal
