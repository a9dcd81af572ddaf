// Transposed copy of an f32 matrix.
#pragma once

#include <cstdint>

namespace cistron::ops::internal {

// to[j, i] = from[i, j] for i in [0, rows), j in [0, cols); strides of rows in elements.
void TransposeF32(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t cols,
                  float* to, std::int64_t to_stride);

}  // namespace cistron::ops::internal
