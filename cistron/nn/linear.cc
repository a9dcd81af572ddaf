#include "cistron/nn/linear.h"

namespace cistron::nn {

Linear::Linear(ParameterStore& store, const std::string& name, std::int64_t out_features,
               std::int64_t in_features, Precision precision)
    : products_(store, store.Register({.name = name, .shape = {out_features, in_features}})),
      precision_(precision),
      out_features_(out_features),
      in_features_(in_features) {}

Tensor Linear::Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs&,
                       Saved* saved) const {
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) == in_features_, "{}: x is {}, expected [T, {}]",
                name(), Describe(x), in_features_);
  Operand input = Input(x);
  Tensor y = ctx.Empty({x.dim(0), out_features_}, x.dtype());
  Forward(ctx, input, saved == nullptr ? nullptr : &saved->Push<SavedOperand>(this, name()),
          ops::Write(y));
  return y;
}

Tensor Linear::Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                        Saved& saved) const {
  const auto x = saved.Pop<SavedOperand>(this, name());
  products_.CheckVersion(x.version);
  CISTRON_CHECK(dy && dy.rank() == 2 && dy.dim(1) == out_features_,
                "{}: dy is {}, expected [T, {}]", name(), Describe(dy), out_features_);
  Operand gradient = products_.OutputGradient(dy, {});
  if (out.weights) products_.Wgrad(ctx, gradient, x);
  if (!out.input) return {};
  Tensor dx = ctx.Empty({dy.dim(0), in_features_}, dy.dtype());
  products_.Dgrad(ctx, x.recipe, gradient, ops::Write(dx));
  return dx;
}

void Linear::Forward(const ops::Context& ctx, Operand& x, SavedOperand* saved,
                     const ops::Output& y) const {
  const quant::Recipe recipe =
      precision_ == Precision::kRecipe ? products_.recipe() : quant::Recipe(quant::BF16{});
  products_.Forward(ctx, recipe, x, saved != nullptr, y);
  if (saved != nullptr) *saved = products_.Save(ctx, recipe, x);
}

void Linear::Backward(const ops::Context& ctx, const Tensor& dy, const SavedOperand& x,
                      const ops::Output& dx) const {
  Operand gradient = products_.OutputGradient(dy, {});
  products_.Wgrad(ctx, gradient, x);
  products_.Dgrad(ctx, x.recipe, gradient, dx);
}

}  // namespace cistron::nn
