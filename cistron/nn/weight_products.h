// WeightProducts: the three products of a linear layer's weight, dense or one a group (expert), in
// the model's dtype or in the recipe in force.
//
//   Forward  y = x · wᵀ      Dgrad  dx = dy · w      Wgrad  dw (= or +=) dyᵀ · x
#pragma once

#include <functional>

#include "cistron/nn/operand.h"
#include "cistron/nn/parameter.h"

namespace cistron::nn {

class WeightProducts {
 public:
  // `weight` is [N, K], or [E, N, K] for operands with split_sizes.
  WeightProducts(ParameterStore& store, ParameterId weight) : store_(&store), weight_(weight) {}

  // The recipe in force for the layer, quant::RecipeFor its parameter's name.
  quant::Recipe recipe() const;
  const std::string& name() const { return store_->spec(weight_).name; }
  // Whose states of delayed scaling its operands have.
  const void* owner() const { return store_; }
  void SetRowParts(std::int64_t parts) const { store_->SetRowParts(weight_, parts); }
  // Gate and up rows of the weight alternate in blocks of so many; 0: they do not. Forward then
  // refuses recipes whose own blocks would lie over a border: their codes would not be those of
  // gate and up by themselves.
  void SetOutputInterleave(std::int64_t block) { output_interleave_ = block; }
  const ParameterSpec& spec() const { return store_->spec(weight_); }
  // Backward must see the weights of its forward: record version() there, and check it. Save does
  // the former, Wgrad the latter; who calls Dgrad alone checks.
  std::uint64_t version() const { return store_->version(); }
  void CheckVersion(std::uint64_t version_of_forward) const;
  // For fused ops: the weight in the model's dtype, held while the result lives, and the place of
  // its gradient.
  AcquiredWeight Weight() const { return {*store_, weight_}; }
  ops::Output GradientOutput() const { return store_->GradientOutput(weight_); }
  // What hands partial sums of squares of the gradient to the store; null where it takes none.
  std::function<void(const Tensor&)> SquareSumsTaker() const;
  QuantizedTensor Quantized(const quant::Recipe& recipe) const {
    return store_->AcquireQuantized(weight_, recipe);
  }
  // Wrappers of an input and of an output's gradient, quantised as this weight needs them.
  Operand Input(const Tensor& x, const Tensor& split_sizes) const;
  Operand OutputGradient(const Tensor& dy, const Tensor& split_sizes) const;

  // What Wgrad will need of x.
  SavedOperand Save(const ops::Context& ctx, const quant::Recipe& recipe, Operand& x) const {
    return x.Save(ctx, recipe, version());
  }

  // `for_backward`: x will be saved, so that its column-wise copy is made in the same pass.
  void Forward(const ops::Context& ctx, const quant::Recipe& recipe, Operand& x, bool for_backward,
               const ops::Output& y) const;
  void Dgrad(const ops::Context& ctx, const quant::Recipe& recipe, Operand& dy,
             const ops::Output& dx) const;
  // The gradient goes to the store.
  void Wgrad(const ops::Context& ctx, Operand& dy, const SavedOperand& x) const;

 private:
  bool grouped() const { return store_->spec(weight_).shape.rank() == 3; }
  void CheckInterleave(const quant::Recipe& recipe) const;

  ParameterStore* store_;
  ParameterId weight_;
  std::int64_t output_interleave_ = 0;
};

}  // namespace cistron::nn
