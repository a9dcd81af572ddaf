// Problems of RMSNorm that the unit test, the gradient check and the benchmark run.
#pragma once

#include <cstdint>
#include <vector>

namespace cistron::ops {

struct RmsNormCase {
  std::int64_t rows, width;
  bool gpu_alone = false;  // not worth the time of a CPU
};

// Widths around the vectors of every instruction set; rows around a partial sum of dg (32), and so
// many that partial sums take more rows (above 8,192). 9 × 1501 and 3 × 9000: rows of a GPU that
// take a block and do not stay in registers, in single elements and in packs. From 5 × 128 on:
// every tile of norm_tile.cuh, full and not; the last three have more rows than all blocks take at
// once.
inline std::vector<RmsNormCase> RmsNormCases() {
  return {{0, 8},    {1, 1},     {1, 7},     {3, 16},           {5, 33},          {31, 64},
          {33, 192}, {40, 256},  {20, 1000}, {8300, 1},         {9, 1501},        {3, 9000},
          {5, 128},  {100, 256}, {37, 512},  {19, 768},         {45, 1024},       {11, 2048},
          {7, 4096}, {3, 8192},  {12700, 8}, {1700, 520, true}, {420, 2056, true}};
}

}  // namespace cistron::ops
