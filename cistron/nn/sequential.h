// Sequential: basic ops one after another, run by the plan that the fuser makes of them.
//
//   nn::Sequential experts{
//       nn::GroupedLinear({.num_groups = E, .in_features = H, .out_features = 2 * F}),
//       nn::ScaledSwiGLU(),
//       nn::GroupedLinear({.num_groups = E, .in_features = F, .out_features = H})};
//   quant::Autocast autocast(quant::MXFP8BlockScaling{});
//   nn::Saved saved;
//   Tensor y = experts.Forward(ctx, x, {.split_sizes = counts, .scale = probs}, &saved);
//   Tensor dx = experts.Backward(ctx, dy, {.scale = ops::Write(dprobs)}, saved);
//
// Ops that share a store register their parameters where they are built. Braces build arguments
// from left to right; parentheses leave the order to the compiler.
// Ops that were given no name take one of their position, "0.weight" and "2.weight" above: layers
// without a name draw different weights and, under DelayedScaling, have scales of their own.
// An op is told what the next one takes its columns for (BasicOp::input_parts): gate and up are
// quantised apart without being asked.
// Whether dx is wanted is known when backward begins, and is part of the plan: what is not joint is
// planned anew there.
// With Context::WithStrict a pattern whose window is there but does not fire is an error.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cistron/nn/basic_op.h"
#include "cistron/nn/fuse/plan.h"

namespace cistron::nn {

class Sequential {
 public:
  template <class... Ops>
  requires(std::is_base_of_v<BasicOp, std::remove_cvref_t<Ops>>&&...) explicit Sequential(
      Ops&&... ops) {
    (Append(std::make_unique<std::remove_cvref_t<Ops>>(std::forward<Ops>(ops))), ...);
  }
  Sequential(Sequential&&) = default;

  void Append(std::unique_ptr<BasicOp> op);

  std::size_t size() const { return ops_.size(); }
  const BasicOp& op(std::size_t i) const { return *ops_.at(i); }

  // Each op takes of `extra` what it names. `saved` null: there will be no backward.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const;
  // Weight gradients go to the parameter stores. Returns dx, undefined when it is not wanted.
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const;

  // False: every op runs by itself, the unfused reference.
  void EnableFusion(bool fuse) { fuse_ = fuse; }

  // The plan under the recipe in force, and for every pattern that did not fire the op, the reason
  // and the remedy.
  std::string Explain(const ops::Context& ctx, DType dtype, bool training = true,
                      bool input_gradient = true) const;
  fuse::Plan MakePlan(const ops::Context& ctx, DType dtype, bool training,
                      bool input_gradient = true) const;

 private:
  std::shared_ptr<const fuse::Plan> PlanFor(const ops::Context& ctx, DType dtype,
                                            bool training) const;

  // The plan of a forward pass, with backward for the gradient mask.
  std::shared_ptr<const fuse::Plan> BackwardPlan(const std::shared_ptr<const fuse::Plan>& plan,
                                                 bool input_gradient) const;

  bool AnyTakes(std::string_view input) const;

  std::vector<std::unique_ptr<BasicOp>> ops_;
  std::vector<const BasicOp*> view_;
  bool fuse_ = true;
  mutable std::shared_ptr<const fuse::Plan> plan_;  // the last one
  // The last one whose mask was another than that of the plan of its forward.
  mutable std::shared_ptr<const fuse::Plan> masked_from_, masked_;
};

}  // namespace cistron::nn
