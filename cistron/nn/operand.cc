#include "cistron/nn/operand.h"

#include "cistron/quant/quantizer.h"

namespace cistron::nn {

const QuantizedTensor& Operand::Quantized(const ops::Context& ctx, const quant::Recipe& recipe,
                                          bool columnwise) {
  if (!quantized_.rowwise || (columnwise && !quantized_.columnwise) || !(recipe == recipe_)) {
    recipe_ = recipe;
    quantized_ = quant::QuantizeOperand(ctx, recipe,
                                        {.role = role_,
                                         .name = name_,
                                         .owner = owner_,
                                         .is_expert = is_expert_,
                                         .x = x_,
                                         .split_sizes = split_sizes_,
                                         .col_parts = col_parts_,
                                         .copies = {.rowwise = true, .columnwise = columnwise}});
  }
  return quantized_;
}

SavedOperand Operand::Save(const ops::Context& ctx, const quant::Recipe& recipe,
                           std::uint64_t version) {
  if (!quant::Quantizes(recipe)) return {recipe, x_, {}, version};
  SavedOperand saved{recipe, {}, Quantized(ctx, recipe, /*columnwise=*/true), version};
  if (!IsDirectionless(saved.quantized.layout.scaling)) saved.quantized.rowwise = {};
  return saved;
}

}  // namespace cistron::nn
