// Products of quantised operands that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

// How the operands of a layer are quantised: x, w and dy of quantized_gemm.h.
struct QuantizedGemmRecipe {
  const char* name;
  QuantizedLayout activation, weight, gradient;
};
inline constexpr QuantizedGemmRecipe kQuantizedGemmRecipes[] = {
    {"mxfp8", {Scaling::kMxfp8}, {Scaling::kMxfp8}, {Scaling::kMxfp8}},
    {"mxfp8 square weights, e5m2 gradients",
     {Scaling::kMxfp8},
     {Scaling::kMxfp8Block32x32},
     {Scaling::kMxfp8, DType::kE5M2}},
    {"tensor, hybrid", {Scaling::kTensor}, {Scaling::kTensor}, {Scaling::kTensor, DType::kE5M2}},
    {"block", {Scaling::kBlock1x128}, {Scaling::kBlock128x128}, {Scaling::kBlock1x128}},
};

// Without counts a dense product of `rows` rows.
struct QuantizedGemmCase {
  std::vector<std::int64_t> counts;
  std::int64_t n, k;
  std::int64_t parts = 1;  // gate and up apart along N
  std::int64_t rows = 0;
};
inline std::vector<QuantizedGemmCase> QuantizedGemmCases() {
  return {
      {{0, 1, 7, 33}, 24, 40},
      {{0, 0, 50}, 2 * 33, 130, 2},  // parts that end within a block
      {{32, 32, 32}, 64, 32, 2},
      {{5, 260, 0, 1}, 2 * 70, 16, 2},
      {{11, 0, 3, 29, 17, 2}, 40, 24},
      {{0, 0}, 8, 8},
      {{}, 33, 65, 1, 70},
      {{}, 136, 40, 2, 150},  // more than one task, or one panel of the fewest rows
      {{}, 8, 16, 1, 0},
  };
}

}  // namespace cistron::ops
