// Quantisations that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

struct QuantizeCase {
  const char* name;
  Shape shape;
  std::vector<std::int64_t> split_sizes = {};  // groups of rows where it is not empty
  std::int64_t row_parts = 1, col_parts = 1;
};

inline std::vector<QuantizeCase> QuantizeCases() {
  return {
      {"one value", {1, 1}},
      {"one block", {32, 32}},
      {"whole blocks", {128, 256}},
      {"ragged last blocks", {133, 301}},
      {"narrow", {300, 7}},
      {"wide", {3, 2500}},
      {"no rows", {0, 64}},
      {"no columns", {5, 0}},
      {"gate and up rows", {2 * 45, 96}, {}, 2, 1},
      {"gate and up columns", {70, 2 * 83}, {}, 1, 2},
      {"matrices", {3, 2 * 40, 2 * 37}, {}, 2, 2},
      {"no matrices", {0, 8, 8}},
      {"empty, few and many rows", {45, 72}, {0, 1, 7, 33, 0}},
      {"all rows in one group", {150, 40}, {0, 0, 140, 0}},
      {"uniform groups", {128, 33}, {32, 32, 32, 32}},
      {"uneven groups, gate and up", {420, 2 * 41}, {130, 3, 31, 200, 0, 50}, 1, 2},
      {"all groups empty", {6, 40}, {0, 0, 0}},
  };
}

inline constexpr Scaling kScalings[] = {Scaling::kTensor, Scaling::kBlock1x128,
                                        Scaling::kBlock128x128, Scaling::kMxfp8,
                                        Scaling::kMxfp8Block32x32};

// Activations of a layer, larger than the caches, for the benchmark.
struct QuantizeShape {
  const char* name;
  std::int64_t rows, cols;
};
inline constexpr QuantizeShape kQuantizeShapes[] = {
    {"L0 rows", 65536, 256}, {"small rows", 32768, 768}, {"wide rows", 16384, 1536}};

}  // namespace cistron::ops
