// What the vector kernels of SwiGLU are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"

namespace cistron::ops::internal {

// Pointers are to row 0; strides in elements. Null where a tensor is not given.
template <class T>
struct SwiGluForwardArgs {
  const T* x;
  std::int64_t x_stride;
  const float* row_scale;
  T* y;
  std::int64_t y_stride;
  std::int64_t width;  // F
  bool accumulate;
};
template <class T>
struct SwiGluBackwardArgs {
  const T *dy, *x;
  std::int64_t dy_stride, x_stride;
  const float* row_scale;
  T* dx;
  std::int64_t dx_stride;
  float* dscale;
  T* y;
  std::int64_t y_stride;
  std::int64_t width;
  bool accumulate_dx, accumulate_dscale, accumulate_y;
};

// Rows [begin, end) with the best instruction set of this machine.
void SwiGluForwardRows(const SwiGluForwardArgs<float>& args, std::int64_t begin, std::int64_t end);
void SwiGluForwardRows(const SwiGluForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end);
void SwiGluBackwardRows(const SwiGluBackwardArgs<float>& args, std::int64_t begin,
                        std::int64_t end);
void SwiGluBackwardRows(const SwiGluBackwardArgs<bf16>& args, std::int64_t begin, std::int64_t end);

}  // namespace cistron::ops::internal
