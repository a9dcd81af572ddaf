// What the vector kernels of permute are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"

namespace cistron::ops::internal {

// Pointers are to row 0; strides in elements. Null where a tensor is not given.
template <class T>
struct PermuteArgs {
  const std::int32_t* slot_of_row;
  std::int64_t top_k;
  const T* x;
  std::int64_t x_stride;
  T* rows;
  std::int64_t rows_stride;
  std::int64_t width;
  bool accumulate;
};
template <class T>
struct UnpermuteArgs {
  const std::int32_t* row_of_slot;
  std::int64_t top_k;
  const T* rows;
  std::int64_t rows_stride;
  const float* probs;
  T* y;
  std::int64_t y_stride;
  std::int64_t width;
  bool accumulate;
};
template <class T>
struct UnpermuteBackwardArgs {
  const std::int32_t* row_of_slot;
  std::int64_t top_k;
  const T *dy, *rows;
  std::int64_t dy_stride, rows_stride;
  const float* probs;
  T* drows;
  std::int64_t drows_stride;
  float* dprobs;
  std::int64_t width;
  bool accumulate_drows, accumulate_dprobs;
};

// Permuted rows [begin, end).
void PermuteRange(const PermuteArgs<float>& args, std::int64_t begin, std::int64_t end);
void PermuteRange(const PermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end);
// Tokens [begin, end).
void UnpermuteRange(const UnpermuteArgs<float>& args, std::int64_t begin, std::int64_t end);
void UnpermuteRange(const UnpermuteArgs<bf16>& args, std::int64_t begin, std::int64_t end);
void UnpermuteBackwardRange(const UnpermuteBackwardArgs<float>& args, std::int64_t begin,
                            std::int64_t end);
void UnpermuteBackwardRange(const UnpermuteBackwardArgs<bf16>& args, std::int64_t begin,
                            std::int64_t end);

}  // namespace cistron::ops::internal
