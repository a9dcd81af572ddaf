// Recipes: which 8-bit format and which scaling each operand of a product takes.
//
// Names and defaults are those of Transformer Engine's recipes. Only the products of linear layers
// are quantised; embedding, router, norms, attention scores, head and master weights are not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cistron/ops/quantize/delayed_scaling.h"
#include "cistron/tensor/quantized_tensor.h"

namespace cistron::quant {

// kHybrid: e4m3 for inputs and weights, e5m2 for gradients of outputs.
enum class Fp8Format : std::uint8_t { kHybrid, kE4M3 };

// What a tensor is to the product that it enters.
enum class TensorRole : std::uint8_t { kInput, kWeight, kOutputGradient };
std::string_view Name(TensorRole role);

// No quantisation: operands in the model's dtype.
struct BF16 {
  friend bool operator==(const BF16&, const BF16&) = default;
};
// One scale a tensor (an expert's part of a grouped one), from the amax of past steps.
struct DelayedScaling {
  Fp8Format fp8_format = Fp8Format::kHybrid;
  int margin = 0;
  std::int64_t amax_history_len = 1024;
  ops::AmaxCompute amax_compute_algo = ops::AmaxCompute::kMax;
  friend bool operator==(const DelayedScaling&, const DelayedScaling&) = default;
};
// One scale a tensor (an expert's part of a grouped one), from its amax now.
struct Float8CurrentScaling {
  Fp8Format fp8_format = Fp8Format::kHybrid;
  bool power_of_two_scales = false;
  friend bool operator==(const Float8CurrentScaling&, const Float8CurrentScaling&) = default;
};
// Strips of 128 for inputs and gradients, squares of 128 × 128 for weights.
struct Float8BlockScaling {
  Fp8Format fp8_format = Fp8Format::kE4M3;
  bool power_of_two_scales = true;
  bool weights_2d = true;  // false: strips for weights too
  friend bool operator==(const Float8BlockScaling&, const Float8BlockScaling&) = default;
};
// One power of two for every 32 values.
struct MXFP8BlockScaling {
  Fp8Format fp8_format = Fp8Format::kE4M3;
  bool weights_2d = false;  // true: squares of 32 × 32 for weights, one copy for both products
  friend bool operator==(const MXFP8BlockScaling&, const MXFP8BlockScaling&) = default;
};

using Recipe =
    std::variant<BF16, DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling>;

// "MXFP8BlockScaling".
std::string_view Name(const Recipe& recipe);
// False for BF16.
bool Quantizes(const Recipe& recipe);
// How a tensor of that role is quantised; parts are left at 1. Throws for BF16.
QuantizedLayout LayoutOf(const Recipe& recipe, TensorRole role);
// Whether f32 scales are powers of two.
bool PowerOfTwoScales(const Recipe& recipe);
// How rows of an input may be quantised before they reach its layer, where the layer reads them
// row-wise alone: quantising the decoded values gives these values again. Blocks along the row
// whose scale is a power of two (MXFP8BlockScaling; Float8BlockScaling with power_of_two_scales);
// none where a scale is that of rows elsewhere too, or where decoding rounds.
std::optional<QuantizedLayout> RowCodesOf(const Recipe& recipe);
// Throws kInvalidArgument naming the option and its value: margin outside 0…64, an empty history.
void Validate(const Recipe& recipe);

}  // namespace cistron::quant
