// Operand: an activation or a gradient that enters products with weights, in the model's dtype or
// quantised as a recipe says, once for all the products that it enters.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "cistron/ops/context.h"
#include "cistron/quant/recipe.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::nn {

// What forward keeps of its input for the weight gradient: the tensor itself, or its column-wise
// codes alone. Backward follows the recipe that forward followed, and is refused where the weights
// are no longer those of forward.
struct SavedOperand {
  quant::Recipe recipe;
  Tensor tensor;              // BF16
  QuantizedTensor quantized;  // every other recipe
  std::uint64_t version = 0;  // of the weights that it was multiplied with

  std::int64_t bytes() const { return tensor ? tensor.bytes() : quantized.bytes(); }
};

class Operand {
 public:
  // `owner`: the layer's parameter store; see quant::QuantizeRequest.
  // `is_expert`: see quant::QuantizeRequest.
  // x [M, K], with split_sizes i64 [G] where its rows belong to groups. `name` is that of the
  // layer's parameter (state of delayed scaling); `col_parts` as in QuantizedLayout.
  Operand(Tensor x, Tensor split_sizes, quant::TensorRole role, std::string name, const void* owner,
          bool is_expert, std::int64_t col_parts = 1)
      : x_(std::move(x)),
        split_sizes_(std::move(split_sizes)),
        role_(role),
        name_(std::move(name)),
        owner_(owner),
        is_expert_(is_expert),
        col_parts_(col_parts) {}

  const Tensor& tensor() const { return x_; }
  const Tensor& split_sizes() const { return split_sizes_; }

  // The quantised tensor; the copies are those asked for at the first call with a recipe.
  const QuantizedTensor& Quantized(const ops::Context& ctx, const quant::Recipe& recipe,
                                   bool columnwise);
  // `version`: of the weights, ParameterStore::version().
  SavedOperand Save(const ops::Context& ctx, const quant::Recipe& recipe, std::uint64_t version);

 private:
  Tensor x_, split_sizes_;
  quant::TensorRole role_;
  std::string name_;
  const void* owner_;
  bool is_expert_;
  std::int64_t col_parts_;
  quant::Recipe recipe_;
  QuantizedTensor quantized_;
};

}  // namespace cistron::nn
