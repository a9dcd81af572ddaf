#include "cistron/quant/recipe.h"

#include "cistron/base/error.h"

namespace cistron::quant {
namespace {

DType FormatOf(Fp8Format format, TensorRole role) {
  const bool wide = format == Fp8Format::kHybrid && role == TensorRole::kOutputGradient;
  return wide ? DType::kE5M2 : DType::kE4M3;
}

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace

std::string_view Name(TensorRole role) {
  switch (role) {
    case TensorRole::kInput: return "input";
    case TensorRole::kWeight: return "weight";
    case TensorRole::kOutputGradient: return "output_gradient";
  }
  return "?";
}

std::string_view Name(const Recipe& recipe) {
  constexpr std::string_view kNames[] = {"BF16", "DelayedScaling", "Float8CurrentScaling",
                                         "Float8BlockScaling", "MXFP8BlockScaling"};
  static_assert(std::size(kNames) == std::variant_size_v<Recipe>);
  return kNames[recipe.index()];
}

bool Quantizes(const Recipe& recipe) {
  return !std::holds_alternative<BF16>(recipe);
}

QuantizedLayout LayoutOf(const Recipe& recipe, TensorRole role) {
  const bool weight = role == TensorRole::kWeight;
  return std::visit(
      Overloaded{[](const BF16&) -> QuantizedLayout {
                   CISTRON_THROW(kInvalidArgument, "recipe BF16 quantises nothing");
                 },
                 [&](const Float8BlockScaling& r) -> QuantizedLayout {
                   return {weight && r.weights_2d ? Scaling::kBlock128x128 : Scaling::kBlock1x128,
                           FormatOf(r.fp8_format, role)};
                 },
                 [&](const MXFP8BlockScaling& r) -> QuantizedLayout {
                   return {weight && r.weights_2d ? Scaling::kMxfp8Block32x32 : Scaling::kMxfp8,
                           FormatOf(r.fp8_format, role)};
                 },
                 [&](const auto& r) -> QuantizedLayout {
                   return {Scaling::kTensor, FormatOf(r.fp8_format, role)};
                 }},
      recipe);
}

bool PowerOfTwoScales(const Recipe& recipe) {
  if (const auto* current = std::get_if<Float8CurrentScaling>(&recipe)) {
    return current->power_of_two_scales;
  }
  if (const auto* block = std::get_if<Float8BlockScaling>(&recipe)) {
    return block->power_of_two_scales;
  }
  return false;
}

std::optional<QuantizedLayout> RowCodesOf(const Recipe& recipe) {
  const bool rows_alone = std::holds_alternative<MXFP8BlockScaling>(recipe) ||
                          std::holds_alternative<Float8BlockScaling>(recipe);
  const bool repeatable =
      std::holds_alternative<MXFP8BlockScaling>(recipe) || PowerOfTwoScales(recipe);
  if (!rows_alone || !repeatable) return std::nullopt;
  return LayoutOf(recipe, TensorRole::kInput);
}

void Validate(const Recipe& recipe) {
  const auto* delayed = std::get_if<DelayedScaling>(&recipe);
  if (delayed == nullptr) return;
  CISTRON_CHECK(delayed->amax_history_len >= 1,
                "DelayedScaling: amax_history_len = {} must be at least 1",
                delayed->amax_history_len);
  CISTRON_CHECK(delayed->margin >= 0 && delayed->margin <= 64,
                "DelayedScaling: margin = {} must be 0…64", delayed->margin);
}

}  // namespace cistron::quant
