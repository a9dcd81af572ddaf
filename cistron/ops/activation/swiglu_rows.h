// What the vector kernels of SwiGLU are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"

namespace cistron::ops::internal {

// What an op touches beyond this leaves the last cache before the next op reads it: outputs are
// then stored past the caches, where they can be. A common size and not this machine's: in a
// virtual machine neither CPUID nor the C library tells it (seen: ten times too large). Results do
// not depend on it.
inline constexpr std::int64_t kLastCacheBytes = std::int64_t{16} << 20;

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
  bool past_caches;  // see kLastCacheBytes
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
  bool past_caches;
};

// Rows [begin, end) with the best instruction set of this machine.
void SwiGluForwardRows(const SwiGluForwardArgs<float>& args, std::int64_t begin, std::int64_t end);
void SwiGluForwardRows(const SwiGluForwardArgs<bf16>& args, std::int64_t begin, std::int64_t end);
void SwiGluBackwardRows(const SwiGluBackwardArgs<float>& args, std::int64_t begin,
                        std::int64_t end);
void SwiGluBackwardRows(const SwiGluBackwardArgs<bf16>& args, std::int64_t begin, std::int64_t end);

}  // namespace cistron::ops::internal
