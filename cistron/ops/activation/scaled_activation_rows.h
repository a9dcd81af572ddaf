// What the vector kernels of the scaled activations are given; nothing of an instruction set.
#pragma once

#include <cstdint>

#include "cistron/base/float_types.h"
#include "cistron/ops/activation/scaled_activation.h"

namespace cistron::ops::internal {

// Pointers are to row 0; strides in elements. Null where a tensor is not given.
template <class T>
struct ScaledActivationArgs {
  ActivationConfig config;
  std::int64_t width;        // F
  std::int64_t segment;      // gate columns that lie one after another: g or F
  std::int64_t up_distance;  // from a gate to its up column; 0 where there is none
  const T* x;
  std::int64_t x_stride;
  const float* row_scale;
  T* y;  // of forward, or written again by backward
  std::int64_t y_stride;
  bool accumulate_y;
  // Backward alone.
  const T* dy = nullptr;
  std::int64_t dy_stride = 0;
  T* dx = nullptr;
  std::int64_t dx_stride = 0;
  float* dscale = nullptr;
  bool accumulate_dx = false, accumulate_dscale = false;
};

// Rows [begin, end) with the best instruction set of this machine.
void ActivationForwardRows(const ScaledActivationArgs<float>& args, std::int64_t begin,
                           std::int64_t end);
void ActivationForwardRows(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                           std::int64_t end);
void ActivationBackwardRows(const ScaledActivationArgs<float>& args, std::int64_t begin,
                            std::int64_t end);
void ActivationBackwardRows(const ScaledActivationArgs<bf16>& args, std::int64_t begin,
                            std::int64_t end);

}  // namespace cistron::ops::internal
