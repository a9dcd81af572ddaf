// State of delayed scaling: plain tensors by name, for checkpoints.
//
// A step: every tensor that is quantised leaves its amax; micro-batches take the larger one.
// EndStep, after the optimiser's update, moves the history on and makes the next step's scales. In
// evaluation activations use the scales as they are and leave nothing. A weight leaves its amax
// whenever its new values are quantised first, be it for evaluation: it is the same number.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cistron/ops/context.h"
#include "cistron/quant/recipe.h"

namespace cistron::quant {

class ScalingStates {
 public:
  struct State {
    Tensor scale;         // f32 [G], starts at 1
    Tensor amax_history;  // f32 [N, G], starts at 0
    Tensor amax;          // f32 [G], of this step so far
    bool recorded = false;
    DType format = DType::kE4M3;
    DelayedScaling recipe;
  };

  // The state of a tensor, made at its first use. Throws when it exists with other sizes: those of
  // a checkpoint made with another model or history length.
  State& Get(const std::string& name, const DelayedScaling& recipe, DType format,
             std::int64_t groups);
  // Largest of what was recorded and `amax` f32 of the groups from `first_group` on; NaN stays.
  static void Record(State& state, const Tensor& amax, std::int64_t first_group = 0);
  // Moves every state that recorded something in this step.
  void EndStep(const ops::Context& ctx);

  // "NAME/scale" and "NAME/amax_history" of every state, sorted; tensors are shared.
  struct NamedTensor {
    std::string name;
    Tensor tensor;
  };
  std::vector<NamedTensor> Tensors() const;
  // Puts back what Tensors gave, before the first step. Throws for a name that is neither.
  void Restore(const std::string& name, const Tensor& tensor);

 private:
  std::map<std::string, State> states_;
};

}  // namespace cistron::quant
