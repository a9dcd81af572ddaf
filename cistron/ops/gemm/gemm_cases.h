// Products that the unit test checks and the benchmark measures.
#pragma once

#include <cstdint>

#include "cistron/ops/gemm/gemm.h"

namespace cistron::ops {

struct GemmCase {
  const char* name;
  std::int64_t m, n, k;
  Transpose trans_a = Transpose::kNo;
  Transpose trans_b = Transpose::kNo;
};

inline constexpr GemmCase kGemmCases[] = {
    {"one element", 1, 1, 1},
    {"one token", 1, 96, 64, Transpose::kNo, Transpose::kYes},
    {"one column", 33, 1, 70},
    {"odd sizes", 7, 13, 5},
    {"odd sizes, bᵀ", 33, 19, 67, Transpose::kNo, Transpose::kYes},
    {"odd sizes, aᵀ", 31, 29, 35, Transpose::kYes, Transpose::kNo},
    {"odd sizes, aᵀ bᵀ", 23, 37, 41, Transpose::kYes, Transpose::kYes},
    {"no rows", 0, 8, 8},
    {"no columns", 8, 0, 8},
    {"empty sum", 5, 6, 0},
    {"long sum", 5, 17, 1500, Transpose::kNo, Transpose::kYes},
    {"many rows, odd sizes, bᵀ", 101, 39, 27, Transpose::kNo, Transpose::kYes},
    {"many rows, aᵀ bᵀ", 97, 18, 33, Transpose::kYes, Transpose::kYes},
    {"several threads", 257, 130, 96, Transpose::kNo, Transpose::kYes},
    {"weight gradient", 130, 72, 300, Transpose::kYes, Transpose::kNo},
};

}  // namespace cistron::ops
