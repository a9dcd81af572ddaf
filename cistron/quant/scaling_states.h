// State of delayed scaling: plain tensors by name, for checkpoints.
//
// A step: every tensor that is quantised leaves its amax; micro-batches take the larger one.
// EndStep, after the optimiser's update, moves the history on and makes the next step's scales. In
// evaluation activations use the scales as they are and leave nothing. A weight leaves its amax
// whenever its new values are quantised first, be it for evaluation: it is the same number.
//
// A weight is quantised once for each of its versions and each version() of the states: EndStep may
// give it another scale though it did not change, e.g. because it is frozen. Codes made with one
// object's scales are never taken for another's, be it at the same address.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cistron/ops/context.h"
#include "cistron/quant/amax_reducer.h"
#include "cistron/quant/recipe.h"

namespace cistron::quant {

class ScalingStates {
 public:
  ScalingStates() = default;
  // Moved states are new ones to whoever keeps codes, at both ends.
  ScalingStates(ScalingStates&& other) noexcept;
  ScalingStates& operator=(ScalingStates&& other) noexcept;

  struct State {
    Tensor scale;         // f32 [G], starts at 1
    Tensor amax_history;  // f32 [N, G], starts at 0
    Tensor amax;          // f32 [G], of this step so far
    bool recorded = false;
    const void* owner = nullptr;  // whose tensor it is
    bool used = false;            // false: restored, and nobody asked for it yet
    DType format = DType::kE4M3;
    TensorSharing sharing = TensorSharing::kAll;  // as its last use said
    DelayedScaling recipe;
  };

  // The state of a tensor, made at its first use. Throws when it exists with other sizes: those of
  // a checkpoint made with another model or history length; and when it is in use for another
  // format or by another `owner` (null: none is given), as by two layers of one name.
  State& Get(const std::string& name, const DelayedScaling& recipe, DType format,
             std::int64_t groups, const void* owner = nullptr);
  // Largest of what was recorded and `amax` f32 of the groups from `first_group` on; NaN stays.
  static void Record(State& state, const Tensor& amax, std::int64_t first_group = 0);
  // Moves every state that recorded something in this step. With `ranks`, every one of which calls
  // it after the same step, the amax is first that of all ranks that share the tensor: histories
  // and scales stay the same on them, and advance once a step.
  void EndStep(const ops::Context& ctx, AmaxReducer* ranks = nullptr);

  // "NAME/scale" and "NAME/amax_history" of every state, sorted; tensors are shared.
  struct NamedTensor {
    std::string name;
    Tensor tensor;
  };
  std::vector<NamedTensor> Tensors() const;
  // Puts back what Tensors gave, before the first step. Throws for a name that is neither.
  void Restore(const std::string& name, const Tensor& tensor);

  // Of the scales: changes in EndStep and Restore, and no two objects of a process have the same.
  std::uint64_t version() const { return version_; }

 private:
  void ReduceAmax(AmaxReducer& ranks);
  static std::uint64_t NextVersion();

  std::map<std::string, State> states_;
  std::uint64_t version_ = NextVersion();
};

}  // namespace cistron::quant
