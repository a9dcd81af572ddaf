// Number formats of a run: the model's dtype, and the recipe of its linear layers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/base/dtype.h"
#include "cistron/quant/autocast.h"

namespace cistron::train {

// fp32 and bf16 are dtypes; the others are recipes over a bf16 model with fp32 masters.
enum class Precision { kFp32, kBf16, kFp8Delayed, kFp8Current, kFp8Block, kMxfp8 };

// "fp32", …, as configurations and command lines name them. Throws kInvalidArgument for another
// name.
std::string_view Name(Precision precision);
Precision ParsePrecision(std::string_view name);

// What the recipe's own default is where a key is `auto`.
enum class RecipeFormat { kAuto, kHybrid, kE4M3 };
enum class Switch { kAuto, kOff, kOn };

// Options of recipes (keys recipe.*), each for those recipes that have it.
struct RecipeOptions {
  RecipeFormat format = RecipeFormat::kAuto;
  std::int64_t margin = 0;
  std::int64_t amax_history_len = 1024;
  ops::AmaxCompute amax_compute_algo = ops::AmaxCompute::kMax;
  Switch power_of_two_scales = Switch::kAuto;
  Switch weights_2d = Switch::kAuto;
  std::int64_t first_layers_bf16 = 0;
  std::int64_t last_layers_bf16 = 0;
  std::vector<std::string> bf16_patterns;
};

DType ModelDType(Precision precision);
quant::Recipe MakeRecipe(Precision precision, const RecipeOptions& options);
// `options` with every `auto` replaced by what the precision's recipe makes of it.
RecipeOptions Resolve(Precision precision, const RecipeOptions& options);
quant::HighPrecisionLayers HighPrecisionLayersOf(const RecipeOptions& options,
                                                 std::int64_t num_layers);
// Keys of recipe.* that this precision does not have, for errors; "recipe.margin".
std::vector<std::string> KeysOfOtherRecipes(Precision precision);

}  // namespace cistron::train
