// Vector kernels of quantize over one row of values, for quantize_cpu.cc and the products of
// quantized_gemm, which decode.
//
// A magnitude is the bits of |x| as f32: as integers they are ordered as the values are; those
// above kInfMagnitude are NaN.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

inline constexpr std::uint32_t kInfMagnitude = 0x7f800000u;

// Largest magnitude of n values, 0 of none.
std::uint32_t MaxMagnitude(const float* x, std::int64_t n);
std::uint32_t MaxMagnitude(const bf16* x, std::int64_t n);

// largest[j] = max(largest[j], magnitude of x[j]).
void MaxMagnitudes(const float* x, std::int64_t n, std::uint32_t* largest);
void MaxMagnitudes(const bf16* x, std::int64_t n, std::uint32_t* largest);

// MXFP8's codes of blocks with these magnitudes (NaN apart) and 2^(127 − code).
void Mxfp8Scales(const std::uint32_t* magnitudes, std::int64_t n, DType format, std::uint8_t* codes,
                 float* multipliers);

// codes[j] = fp8(x[j] · multipliers[j]). `finite`: no element is NaN or Inf, and no product exceeds
// the format's maximum by more than an ulp of f32, as in MXFP8 blocks.
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::uint8_t* codes);
// With one multiplier, any values.
void EncodeRow(const float* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);

// MXFP8 along a row: blocks of 32, the last of which may be shorter. Any values.
void QuantizeRowMxfp8(const float* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);
void QuantizeRowMxfp8(const bf16* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);

// to[j] (= or +=) value(codes[j]) · scales[j / block], rounded once. block ≥ 1.
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, float* to);
void DecodeRow(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
               std::int64_t block, bool accumulate, bf16* to);
// As above for products that are bf16 values: nothing is rounded.
void DecodeRowExact(const std::uint8_t* codes, std::int64_t n, DType format, const float* scales,
                    std::int64_t block, bf16* to);

// to[j] = the power of two that e8m0 code j stands for.
void DecodeScales(const std::uint8_t* codes, std::int64_t n, float* to);

}  // namespace cistron::ops::internal
