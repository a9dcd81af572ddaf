// What the CPU implementations of several ops do before they call their vector kernels.
#pragma once

#include "cistron/base/dtype.h"
#include "cistron/ops/context.h"

namespace cistron::ops::internal {

// Calls f with a tag of the element type: f32 or bf16, which is all that vector kernels take.
template <class F>
void DispatchVectorType(DType dtype, F&& f) {
  if (dtype == DType::kBF16) {
    f(TypeTag<bf16>{});
  } else {
    f(TypeTag<float>{});
  }
}

inline float* FloatsOrNull(const Tensor& t) {
  return t ? t.data<float>() : nullptr;
}

inline bool Accumulates(const Output& out) {
  return out && out.mode == WriteMode::kAccumulate;
}

}  // namespace cistron::ops::internal
