// What the vector kernels of RMSNorm are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"

namespace cistron::ops {

// Pointers are to row 0; strides in elements. Null where a tensor is not given.
template <class T>
struct RmsNormForwardArgs {
  const T *x, *residual, *g;
  std::int64_t x_stride, residual_stride;
  T *h, *y;
  std::int64_t h_stride, y_stride;
  float* rstd;
  std::int64_t width;
  float eps;
  bool accumulate;
};
template <class T>
struct RmsNormBackwardArgs {
  const T *dy, *h, *g, *dh_in;
  std::int64_t dy_stride, h_stride, dh_in_stride;
  const float* rstd;
  T* dh;
  std::int64_t dh_stride;
  std::int64_t width;
  bool accumulate;
};

// Rows [begin, end) with the best instruction set of this machine.
void RmsNormForwardRows(const RmsNormForwardArgs<float>& args, std::int64_t begin,
                        std::int64_t end);
void RmsNormForwardRows(const RmsNormForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end);
// Also dg of those rows, [width], unless null.
void RmsNormBackwardRows(const RmsNormBackwardArgs<float>& args, std::int64_t begin,
                         std::int64_t end, float* dg);
void RmsNormBackwardRows(const RmsNormBackwardArgs<bf16>& args, std::int64_t begin,
                         std::int64_t end, float* dg);

}  // namespace cistron::ops
