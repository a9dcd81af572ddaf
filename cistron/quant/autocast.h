// Autocast: the recipe that linear layers follow, for the length of a scope.
//
//   quant::Autocast autocast(quant::MXFP8BlockScaling{});
//   model.TrainMicroBatch(…);       // products in MXFP8; backward follows what forward did
//
// Backward takes its recipe from what forward saved. Under DelayedScaling it must also run inside a
// scope with the states of the step, since that is where it finds scales and leaves amax; weight
// gradients that a layer delayed need no scope.
// Scopes nest, the innermost counts; they belong to the thread that opened them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/quant/amax_reducer.h"
#include "cistron/quant/recipe.h"
#include "cistron/quant/scaling_states.h"

namespace cistron::quant {

// Layers that stay in the model's dtype.
struct HighPrecisionLayers {
  std::int64_t first = 0;             // the first n layers …
  std::int64_t last = 0;              // … and the last n
  std::int64_t num_layers = 0;        // of the model; needed for `last`
  std::vector<std::string> patterns;  // parameter names, * stands for any characters

  // Layers are told by "layers.N." in the parameter's name.
  bool Contains(std::string_view parameter_name) const;
};

struct AutocastOptions {
  HighPrecisionLayers high_precision{};
  ScalingStates* states = nullptr;  // needed by DelayedScaling; must outlive the scope
  bool record_amax = true;          // false in evaluation
  // Where ranks train together: Float8CurrentScaling takes the amax of activations and gradients
  // over those that share the tensor. (DelayedScaling does so once a step: ScalingStates::EndStep.)
  // Must outlive the scope. null: rows elsewhere do not count, as in evaluation.
  AmaxReducer* amax_reducer = nullptr;
};

class Autocast {
 public:
  // Throws when the recipe's options are out of range, or for DelayedScaling without states.
  explicit Autocast(Recipe recipe, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // The innermost scope of this thread; null outside every scope.
  static const Autocast* Current();

  const Recipe& recipe() const { return recipe_; }
  const AutocastOptions& options() const { return options_; }

 private:
  Recipe recipe_;
  AutocastOptions options_;
  const Autocast* outer_;
};

// The reducer of the innermost scope, for a recipe that asks the ranks at each tensor; null else.
AmaxReducer* AmaxReducerFor(const Recipe& recipe);

// The recipe in force for the layer of a parameter: BF16 outside every scope.
Recipe RecipeFor(std::string_view parameter_name);

}  // namespace cistron::quant
