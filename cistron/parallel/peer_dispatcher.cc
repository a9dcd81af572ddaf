#include "cistron/parallel/peer_dispatcher.h"

#include <array>

#include "cistron/parallel/exchange_plan.h"

namespace cistron::parallel {

// Of one dispatch, for its combine and backward.
struct PeerDispatcher::Exchanged final : nn::TokenDispatcher::State {
  ops::RowMap map;  // this rank's assignments, by expert of all ranks
  RowExchange::Plan plan;
  std::int64_t tokens = 0, capacity = 0;
};

PeerDispatcher::PeerDispatcher(const Mesh& mesh, const ops::Context& ctx, std::int64_t num_experts,
                               double factor, double limit_s)
    : mesh_(mesh),
      ctx_(ctx),
      num_experts_(num_experts),
      limit_s_(limit_s),
      factor_(factor),
      exchange_(std::make_unique<RowExchange>(mesh.expert_group(), ctx, num_experts, limit_s)) {}

bool PeerDispatcher::Made(const State& state) {
  return dynamic_cast<const Exchanged*>(&state) != nullptr;
}

std::int64_t PeerDispatcher::Grow(std::int64_t needed) {
  RaiseFactor(GrownFactor(needed, tokens_ * top_k_));
  exchange_.reset();  // before the new one: both might not fit
  exchange_ = std::make_unique<RowExchange>(mesh_.expert_group(), ctx_, num_experts_, limit_s_);
  return BufferRows(factor_, tokens_, top_k_, mesh_.ep());
}

nn::TokenDispatcher::Dispatched PeerDispatcher::Dispatch(
    const ops::Context& ctx, const Tensor& x, const Tensor& experts, const Tensor& probs,
    const std::optional<QuantizedLayout>& /*row_codes: rows are exact*/) {
  auto e = std::make_shared<Exchanged>();
  e->map = ops::BuildRowMap(ctx, experts, num_experts_);
  e->plan = exchange_->NewPlan(ctx);
  e->tokens = x.dim(0);
  e->capacity = BufferRows(factor_, e->tokens, e->map.top_k, mesh_.ep());
  tokens_ = e->tokens;
  top_k_ = e->map.top_k;
  Dispatched d;
  d.rows.data = exchange_->Empty({e->capacity, x.dim(1)}, x.dtype());
  d.rows.split_sizes = e->plan.split_sizes;
  d.probs = exchange_->Empty({e->capacity}, probs.dtype());
  exchange_->Out(ctx, e->map.split_sizes, e->plan, x, e->map.slot_of_row, e->map.top_k, probs,
                 d.rows.data, d.probs);
  d.state = std::move(e);
  return d;
}

Tensor PeerDispatcher::Combine(const ops::Context& ctx, const State& state, const Tensor& rows) {
  const auto& e = static_cast<const Exchanged&>(state);
  const Tensor returned = exchange_->Empty({e.map.slot_of_row.numel(), rows.dim(1)}, rows.dtype());
  exchange_->Back(ctx, e.plan, rows, Tensor(), returned, Tensor());
  const Tensor y = ctx.Empty({e.tokens, rows.dim(1)}, rows.dtype());
  ops::Unpermute(ctx, e.map, returned, Tensor(), ops::Write(y));
  return y;
}

Tensor PeerDispatcher::CombineBackward(const ops::Context& ctx, const State& state,
                                       const Tensor& dy) {
  const auto& e = static_cast<const Exchanged&>(state);
  const Tensor drows = exchange_->Empty({e.capacity, dy.dim(1)}, dy.dtype());
  exchange_->Out(ctx, Tensor(), e.plan, dy, e.map.slot_of_row, e.map.top_k, Tensor(), drows,
                 Tensor());
  return drows;
}

void PeerDispatcher::DispatchBackward(const ops::Context& ctx, const State& state,
                                      const Tensor& drows, const Tensor& drow_probs,
                                      const ops::Output& dx, const ops::Output& dprobs) {
  // Not from here on out of the state's hands: it outlives the call.
  const std::shared_ptr<const State> lent(&state, [](const State*) {});
  BeginDispatchBackward(ctx, lent, drows, drow_probs)(dx, dprobs);
}

nn::TokenDispatcher::Rest PeerDispatcher::BeginDispatchBackward(
    const ops::Context& ctx, const std::shared_ptr<const State>& state, const Tensor& drows,
    const Tensor& drow_probs) {
  const auto& e = static_cast<const Exchanged&>(*state);
  const std::int64_t slots = e.map.slot_of_row.numel();
  const Tensor returned = exchange_->Empty({slots, drows.dim(1)}, drows.dtype());
  const Tensor returned_probs = exchange_->Empty({slots}, drow_probs.dtype());
  const auto wait = exchange_->BackBeside(ctx, e.plan, drows, drow_probs, returned, returned_probs);
  // The tensors are this function's, until the stream has waited.
  return
      [=, keep = std::array{drows, drow_probs}](const ops::Output& dx, const ops::Output& dprobs) {
        wait();
        const auto& of = static_cast<const Exchanged&>(*state);
        ops::Unpermute(ctx, of.map, returned, Tensor(), dx);
        ops::UnpermuteSlots(ctx, of.map, returned_probs, dprobs);
      };
}

}  // namespace cistron::parallel
