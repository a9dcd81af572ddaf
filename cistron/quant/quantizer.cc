#include "cistron/quant/quantizer.h"

#include "cistron/base/error.h"
#include "cistron/quant/autocast.h"

namespace cistron::quant {

QuantizedTensor QuantizeOperand(const ops::Context& ctx, const Recipe& recipe,
                                const QuantizeRequest& r) {
  QuantizedLayout layout = LayoutOf(recipe, r.role);
  layout.row_parts = r.row_parts;
  layout.col_parts = r.col_parts;
  QuantizedTensor q = ops::EmptyQuantized(ctx, r.x.shape(), r.split_sizes, layout, r.copies);
  AmaxReducer* const ranks = AmaxReducerFor(recipe);
  if (ranks != nullptr && r.role != TensorRole::kWeight) {
    const Tensor amax = ctx.Empty({q.num_groups()}, DType::kF32);
    ops::TensorAmax(ctx, r.x, q, amax);
    ranks->Max(amax, r.is_expert ? TensorSharing::kReplicas : TensorSharing::kAll);
    for (float& a : amax.span<float>()) {
      a = ops::ScaleFromAmax(a, layout.format, PowerOfTwoScales(recipe));
    }
    ops::Quantize(ctx, r.x, PowerOfTwoScales(recipe), {amax, {}}, q);
    return q;
  }
  const auto* delayed = std::get_if<DelayedScaling>(&recipe);
  if (delayed == nullptr) {
    ops::Quantize(ctx, r.x, PowerOfTwoScales(recipe), {}, q);
    return q;
  }
  const Autocast* scope = Autocast::Current();
  CISTRON_CHECK(scope != nullptr && scope->options().states != nullptr,
                "delayed scaling: {} is quantised outside every autocast scope that has states",
                r.name);
  ScalingStates::State& state = scope->options().states->Get(
      r.name + "/" + std::string(Name(r.role)), *delayed, layout.format,
      r.groups > 0 ? r.groups : q.num_groups(), r.owner);
  state.sharing = r.is_expert ? TensorSharing::kReplicas : TensorSharing::kAll;
  ops::TensorScale scale{state.scale.Slice(0, r.first_group, q.num_groups()), {}};
  const bool record = scope->options().record_amax || r.role == TensorRole::kWeight;
  if (record) scale.amax = ctx.Empty({q.num_groups()}, DType::kF32);
  ops::Quantize(ctx, r.x, false, scale, q);
  if (record) ScalingStates::Record(state, scale.amax, r.first_group);
  return q;
}

}  // namespace cistron::quant
