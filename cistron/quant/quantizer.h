// Quantises the operands of a product as the recipe in force says.
#pragma once

#include <string>

#include "cistron/ops/context.h"
#include "cistron/ops/quantize/quantize.h"
#include "cistron/quant/recipe.h"

namespace cistron::quant {

struct QuantizeRequest {
  TensorRole role = TensorRole::kInput;
  // Names the state of delayed scaling, with the role; unused by other recipes.
  std::string name{};
  // The state serves one owner, the layer's store or the layer: see ScalingStates::Get.
  const void* owner = nullptr;
  bool is_expert = false;                     // the ranks that hold the same experts share it
  Tensor x;                                   // [M, K] or [G, M, K], f32 or bf16
  Tensor split_sizes{};                       // of a ragged grouped tensor
  std::int64_t row_parts = 1, col_parts = 1;  // see QuantizedLayout
  ops::QuantizeCopies copies{};
  // Where x is part of a tensor of `groups` groups: the first of its own. 0 groups: x is all.
  std::int64_t first_group = 0, groups = 0;
};

// Takes scales from, and leaves amax in, the states of the innermost Autocast (DelayedScaling), or
// takes amax over ranks by its reducer (Float8CurrentScaling; not of weights, which are the same on
// all ranks that hold them).
QuantizedTensor QuantizeOperand(const ops::Context& ctx, const Recipe& recipe,
                                const QuantizeRequest& request);

}  // namespace cistron::quant
