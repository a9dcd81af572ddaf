// Linear: y = x · wᵀ, weight [out, in], no bias.
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"
#include "cistron/nn/weight_products.h"

namespace cistron::nn {

class Linear final : public BasicOp {
 public:
  // Follows the recipe in force, or stays in the model's dtype (routers, heads).
  enum class Precision { kRecipe, kModel };
  Linear(ParameterStore& store, const std::string& name, std::int64_t out_features,
         std::int64_t in_features, Precision precision = Precision::kRecipe);

  std::string_view kind() const override { return "Linear"; }
  std::span<const std::string_view> extra_inputs() const override { return {}; }
  const std::string& name() const override { return products_.name(); }
  // Before the first pass.
  void SetOutputParts(std::int64_t parts) override { products_.SetRowParts(parts); }
  void SetOutputInterleave(std::int64_t block) override { products_.SetOutputInterleave(block); }

  // x [T, in] → [T, out].
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

  // The same in parts, for layers whose linears share an input: `x` is quantised once. `saved`,
  // optional, receives what the weight gradient needs.
  Operand Input(const Tensor& x) const { return products_.Input(x, {}); }
  void Forward(const ops::Context& ctx, Operand& x, SavedOperand* saved,
               const ops::Output& y) const;
  // dy [T, out] → dx [T, in]; `x` is what forward saved, of the same weights. The weight gradient
  // goes to the store.
  void Backward(const ops::Context& ctx, const Tensor& dy, const SavedOperand& x,
                const ops::Output& dx) const;

  std::int64_t out_features() const { return out_features_; }
  std::int64_t in_features() const { return in_features_; }

 private:
  WeightProducts products_;
  Precision precision_;
  std::int64_t out_features_, in_features_;
};

}  // namespace cistron::nn
