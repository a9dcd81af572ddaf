// Vector kernels over one row of 8-bit codes: values and scales, for quantize_cpu.cc and for the
// products of quantized_gemm.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

// to[j] (= or +=) value(codes[j]) · scales[j / block], rounded once. block ≥ 1.
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, float* to);
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, bf16* to);
// As above for products that are bf16 values: nothing is rounded.
void DecodeRowExact(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                    std::int64_t block, bf16* to);

// Smallest and largest of the codes that are at least `lowest` (255 and 0 where there are none),
// and whether others are below.
struct CodeRange {
  std::uint8_t low, high;
  bool any_below;
};
CodeRange ScaleCodeRange(const std::uint8_t* codes, std::int64_t n, std::uint8_t lowest);

// to[j] = the power of two that e8m0 code j stands for.
void DecodeScales(const std::uint8_t* codes, std::int64_t n, float* to);

}  // namespace cistron::ops::internal
