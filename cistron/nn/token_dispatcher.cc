#include "cistron/nn/token_dispatcher.h"

namespace cistron::nn {
namespace {

struct LocalState final : TokenDispatcher::State {
  ops::RowMap map;
  std::int64_t tokens = 0;
};

const LocalState& Local(const TokenDispatcher::State& state) {
  return static_cast<const LocalState&>(state);
}

}  // namespace

TokenDispatcher::Dispatched LocalTokenDispatcher::Dispatch(
    const ops::Context& ctx, const Tensor& x, const Tensor& experts, const Tensor& probs,
    const std::optional<QuantizedLayout>& /*row_codes*/) {
  auto state = std::make_shared<LocalState>();
  state->map = ops::BuildRowMap(ctx, experts, num_experts_);
  state->tokens = x.dim(0);
  const std::int64_t rows = experts.numel();
  Dispatched d;
  d.rows.data = ctx.Empty({rows, x.dim(1)}, x.dtype());
  d.rows.split_sizes = state->map.split_sizes;
  d.probs = ctx.Empty({rows}, probs.dtype());
  ops::Permute(ctx, state->map, x, ops::Write(d.rows.data));
  ops::PermuteSlots(ctx, state->map, probs, ops::Write(d.probs));
  d.state = std::move(state);
  return d;
}

Tensor LocalTokenDispatcher::Combine(const ops::Context& ctx, const State& state,
                                     const Tensor& rows) {
  const LocalState& local = Local(state);
  Tensor y = ctx.Empty({local.tokens, rows.dim(1)}, rows.dtype());
  ops::Unpermute(ctx, local.map, rows, Tensor(), ops::Write(y));
  return y;
}

Tensor LocalTokenDispatcher::CombineBackward(const ops::Context& ctx, const State& state,
                                             const Tensor& dy) {
  const LocalState& local = Local(state);
  Tensor drows = ctx.Empty({local.map.slot_of_row.dim(0), dy.dim(1)}, dy.dtype());
  ops::Permute(ctx, local.map, dy, ops::Write(drows));
  return drows;
}

void LocalTokenDispatcher::DispatchBackward(const ops::Context& ctx, const State& state,
                                            const Tensor& drows, const Tensor& drow_probs,
                                            const ops::Output& dx, const ops::Output& dprobs) {
  const LocalState& local = Local(state);
  ops::Unpermute(ctx, local.map, drows, Tensor(), dx);
  ops::UnpermuteSlots(ctx, local.map, drow_probs, dprobs);
}

}  // namespace cistron::nn
