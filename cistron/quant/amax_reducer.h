// The amax of a tensor whose rows lie on several ranks: parallel/ provides it, null is one rank.
#pragma once

#include <cstdint>

#include "cistron/tensor/tensor.h"

namespace cistron::quant {

// Which ranks have rows of the same tensor.
enum class TensorSharing : std::uint8_t {
  kAll,       // dense layers: every rank has rows of its own
  kReplicas,  // experts: the ranks that hold the same experts
};

class AmaxReducer {
 public:
  virtual ~AmaxReducer() = default;
  // `amax` f32 [G], contiguous, becomes the largest of the ranks that share the tensor; NaN where
  // any is. All of them call it, for the same tensors in the same order.
  virtual void Max(const Tensor& amax, TensorSharing sharing) = 0;
};

}  // namespace cistron::quant
