// Arguments of the kernels of RMSNorm. Pointers are to row 0; strides in elements; null where a
// tensor is not given.
#pragma once

#include <cstdint>

#include "cistron/base/dtype.h"

namespace cistron::ops::norm_kernels {

template <class T>
struct ForwardArgs {
  const T *x, *residual, *g;
  std::int64_t x_stride, residual_stride;
  T *h, *y;
  std::int64_t h_stride, y_stride;
  Compute<T>* rstd;
  std::int64_t rows, width;
  Compute<T> eps;
  bool accumulate;
};

template <class T>
struct BackwardArgs {
  const T *dy, *h, *g, *dh_in;
  std::int64_t dy_stride, h_stride, dh_in_stride;
  const Compute<T>* rstd;
  T* dh;
  std::int64_t dh_stride;
  Compute<T>* parts;  // [blocks, width]: dg of each block's rows
  std::int64_t rows, width, rows_of_block;
  bool accumulate;
};

}  // namespace cistron::ops::norm_kernels
