// Problems of RMSNorm that the unit test, the gradient check and the benchmark run.
#pragma once

#include <cstdint>
#include <vector>

namespace cistron::ops {

struct RmsNormCase {
  std::int64_t rows, width;
};

// Widths around the vectors of every instruction set; rows around a partial sum of dg (32), and so
// many that partial sums take more rows (above 8,192). The last two: rows of a GPU that take a
// block and do not stay in registers, in single elements and in packs.
inline std::vector<RmsNormCase> RmsNormCases() {
  return {{0, 8},    {1, 1},    {1, 7},     {3, 16},   {5, 33},   {31, 64},
          {33, 192}, {40, 256}, {20, 1000}, {8300, 1}, {9, 1501}, {3, 9000}};
}

}  // namespace cistron::ops
