// Vector kernels of quantize over one row of values, for quantize_cpu.cc.
//
// A magnitude is the bits of |x| as f32: as integers they are ordered as the values are; those
// above kInfMagnitude are NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "cistron/base/dtype.h"

namespace cistron::ops::internal {

inline constexpr std::uint32_t kInfMagnitude = 0x7f800000u;

// Largest magnitude of n values, 0 of none.
std::uint32_t MaxMagnitude(const float* x, std::int64_t n);
std::uint32_t MaxMagnitude(const bf16* x, std::int64_t n);

// largest[j] = the larger magnitude of largest[j] and x[j], NaN above all.
void MaxMagnitudes(const float* x, std::int64_t n, float* largest);
void MaxMagnitudes(const bf16* x, std::int64_t n, bf16* largest);

// The value that a magnitude stands for, one NaN for all.
inline float AmaxOf(std::uint32_t magnitude) {
  return magnitude > kInfMagnitude ? std::numeric_limits<float>::quiet_NaN()
                                   : std::bit_cast<float>(magnitude);
}

// Multipliers of single columns lie in the order of lanes of x's type: whole groups of
// kMultiplierPad columns, to which their number is rounded up, hold the same columns in another
// order.
inline constexpr std::int64_t kMultiplierPad = 32;

// For blocks whose largest magnitudes are these, NaN among them: multipliers as ScaleFromAmax, and
// scales[j] = 1 / multiplier of j.
void F32Scales(const float* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers);
void F32Scales(const bf16* largest, std::int64_t n, DType format, bool power_of_two, float* scales,
               float* multipliers);

// codes[j] = fp8(x[j] · multiplier of j). `finite`: no element is NaN or Inf, and no product
// exceeds the format's maximum by more than an ulp of f32. What lies `ahead` elements after x is
// asked for, to be read next.
void EncodeRow(const float* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::int64_t ahead, std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, const float* multipliers, bool finite,
               std::int64_t ahead, std::uint8_t* codes);
// With one multiplier, any values.
void EncodeRow(const float* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);
void EncodeRow(const bf16* x, std::int64_t n, DType format, float multiplier, std::uint8_t* codes);

// MXFP8 along a row: blocks of 32, the last of which may be shorter. Any values.
void QuantizeRowMxfp8(const float* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);
void QuantizeRowMxfp8(const bf16* x, std::int64_t n, DType format, std::uint8_t* codes,
                      std::uint8_t* scales);

// The same for blocks of `block` values with scales in f32, by ScaleFromAmax.
void QuantizeRowF32(const float* x, std::int64_t n, std::int64_t block, DType format,
                    bool power_of_two, std::uint8_t* codes, float* scales);
void QuantizeRowF32(const bf16* x, std::int64_t n, std::int64_t block, DType format,
                    bool power_of_two, std::uint8_t* codes, float* scales);

}  // namespace cistron::ops::internal
