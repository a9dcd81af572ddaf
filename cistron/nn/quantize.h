// Quantize: the values that the recipe in force leaves of an activation.
//
//   forward   y = decode(quantise(x))        backward   dx = dy, or decode(quantise(dy))
// The gradient passes straight through the rounding. Outside every recipe y is x and dx is dy. What
// is quantised twice with the same blocks keeps its values, so a linear layer that follows gets the
// codes that it would have made itself.
#pragma once

#include <string>

#include "cistron/nn/basic_op.h"
#include "cistron/quant/recipe.h"

namespace cistron::nn {

struct QuantizeOptions {
  bool forward = true;
  bool backward = false;
  // By which per-layer rules and delayed scaling know it; empty: "quantize", and "N.quantize" as op
  // N of a Sequential.
  std::string name{};
};

class Quantize final : public BasicOp {
 public:
  explicit Quantize(QuantizeOptions options = {}) : options_(std::move(options)) {
    if (!options_.name.empty()) return;
    options_.name = "quantize";
    unnamed_ = true;
  }

  std::string_view kind() const override { return "Quantize"; }
  std::span<const std::string_view> extra_inputs() const override {
    static constexpr std::string_view kInputs[] = {"split_sizes"};
    return kInputs;
  }
  const std::string& name() const override { return options_.name; }
  void SetPosition(std::size_t position) override;

  // x [M, K], rows in groups where split_sizes is given; rows beyond their sum are left undefined.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

 private:
  struct Record {
    quant::Recipe recipe;
    Tensor split_sizes;
  };
  Tensor Round(const ops::Context& ctx, const Tensor& x, const Tensor& split_sizes,
               const quant::Recipe& recipe, quant::TensorRole role) const;

  QuantizeOptions options_;
  bool unnamed_ = false;
};

}  // namespace cistron::nn
