// What the vector kernels of rope are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"

namespace cistron::ops {

template <class T>
struct RopeArgs {
  const float* table;             // [positions, head_dim / 2, 2]: cos, sin
  const std::int64_t* positions;  // [T]
  std::int64_t head_dim;
  float sign;  // of the sines: −1 rotates backwards
  T* x;
  std::int64_t x_stride;
  std::int64_t width;  // heads · head_dim
};

// Rotates rows [begin, end) with the best instruction set of this machine; `scratch` is [head_dim].
void RopeRows(const RopeArgs<float>& args, std::int64_t begin, std::int64_t end, float* scratch);
void RopeRows(const RopeArgs<bf16>& args, std::int64_t begin, std::int64_t end, float* scratch);

}  // namespace cistron::ops
