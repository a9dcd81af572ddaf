#include "cistron/parallel/expert_parallel_dispatcher.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/quantize/quantize.h"

namespace cistron::parallel {

// Of one dispatch, for its combine and backward.
struct ExpertParallelDispatcher::Exchange final : nn::TokenDispatcher::State {
  ops::RowMap map;  // this rank's assignments, by expert of all ranks
  std::int64_t tokens = 0, sent_rows = 0, received_rows = 0;
  std::vector<std::int64_t> send_counts, receive_counts;  // rows, by rank of the group
  // Received rows (by sender, then expert) to rows by expert, then sender: one slot a row.
  ops::RowMap local;
};

namespace {

// [rows, …] of x's type, one row a row.
Tensor EmptyRows(const ops::Context& ctx, const Tensor& x, std::int64_t rows) {
  Shape shape = x.shape();
  shape[0] = rows;
  return ctx.Empty(shape, x.dtype());
}

// counts[s·L + e]: rows that sender s has for this rank's expert e. The map that sorts them by
// expert, stably; made on the host, and placed where the context's kernels read it.
ops::RowMap SortByExpert(const ops::Context& ctx, std::span<const std::int64_t> counts,
                         std::int64_t senders, std::int64_t experts, std::int64_t rows) {
  ops::RowMap map;
  map.split_sizes = Tensor::Zeros({experts}, DType::kI64);
  const Tensor both = Tensor::Empty({2, rows}, DType::kI32);
  map.row_of_slot = both.Select(0);
  map.slot_of_row = both.Select(1);
  map.top_k = 1;
  std::vector<std::int64_t> begin(counts.size());  // where each (sender, expert) was received
  std::exclusive_scan(counts.begin(), counts.end(), begin.begin(), std::int64_t{0});
  auto* row_of_slot = map.row_of_slot.data<std::int32_t>();
  auto* slot_of_row = map.slot_of_row.data<std::int32_t>();
  auto* split_sizes = map.split_sizes.data<std::int64_t>();
  std::int64_t row = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t s = 0; s < senders; ++s) {
      const auto at = static_cast<std::size_t>(s * experts + e);
      split_sizes[e] += counts[at];
      for (std::int64_t i = 0; i < counts[at]; ++i, ++row) {
        const std::int64_t slot = begin[at] + i;
        row_of_slot[slot] = static_cast<std::int32_t>(row);
        slot_of_row[row] = static_cast<std::int32_t>(slot);
      }
    }
  }
  if (ctx.device().type == DeviceType::kCpu) return map;
  const Tensor placed = ctx.Place(both);
  return {ctx.Place(map.split_sizes), placed.Select(0), placed.Select(1), 1};
}

}  // namespace

ExpertParallelDispatcher::ExpertParallelDispatcher(const Mesh& mesh, const ops::Context& ctx,
                                                   std::int64_t num_experts, bool quantized_rows,
                                                   const ExpertExchange& exchange)
    : mesh_(mesh),
      num_experts_(num_experts),
      quantized_rows_(quantized_rows),
      buffer_factor_(exchange.buffer_factor) {
  if (ctx.device().type == DeviceType::kCpu) return;
  why_by_host_ = exchange.why_by_host;
  if (why_by_host_.empty()) {
    why_by_host_ = comm::nccl::WhyNoPeers(mesh.expert_group(), ctx.device());
  }
  if (!why_by_host_.empty()) return;
  peers_ = std::make_unique<PeerDispatcher>(mesh, ctx, num_experts, exchange.buffer_factor,
                                            exchange.limit_s);
}

void ExpertParallelDispatcher::RaiseBufferFactor(double factor) {
  buffer_factor_ = std::max(buffer_factor_, factor);
  if (peers_) peers_->RaiseFactor(factor);
}

// Rows as they are received: by sender, then expert.
Tensor ExpertParallelDispatcher::Send(const ops::Context& ctx, const Exchange& e,
                                      const Tensor& sent) const {
  const Tensor received = EmptyRows(ctx, sent, e.received_rows);
  mesh_.expert_group().AllToAll(sent, e.send_counts, received, e.receive_counts);
  return received;
}

// The same, but that codes and scales travel.
Tensor ExpertParallelDispatcher::SendQuantized(const ops::Context& ctx, const Exchange& e,
                                               const Tensor& sent,
                                               const QuantizedLayout& layout) const {
  constexpr ops::QuantizeCopies kRowwise{.rowwise = true, .columnwise = false};
  QuantizedTensor q = ops::EmptyQuantized(ctx, sent.shape(), Tensor(), layout, kRowwise);
  ops::Quantize(ctx, sent, /*power_of_two=*/true, {}, q);
  q.rowwise = {Send(ctx, e, q.rowwise.codes), Send(ctx, e, q.rowwise.scales)};
  const Tensor received = EmptyRows(ctx, sent, e.received_rows);
  q.shape = received.shape();
  ops::Dequantize(ctx, q, Direction::kRowwise, ops::Write(received));
  return received;
}

// Received rows in the order of this rank's experts.
Tensor ExpertParallelDispatcher::ToExperts(const ops::Context& ctx, const Exchange& e,
                                           const Tensor& received) const {
  const Tensor rows = EmptyRows(ctx, received, e.received_rows);
  if (received.rank() == 1) {
    ops::PermuteSlots(ctx, e.local, received.Reshape({e.received_rows, 1}), ops::Write(rows));
  } else {
    ops::Permute(ctx, e.local, received, ops::Write(rows));
  }
  return rows;
}

Tensor ExpertParallelDispatcher::FromExperts(const ops::Context& ctx, const Exchange& e,
                                             const Tensor& rows) const {
  const Tensor sorted = EmptyRows(ctx, rows, e.received_rows);
  if (rows.rank() == 1) {
    ops::UnpermuteSlots(ctx, e.local, rows, ops::Write(sorted.Reshape({e.received_rows, 1})));
  } else {
    ops::Unpermute(ctx, e.local, rows, Tensor(), ops::Write(sorted));
  }
  const Tensor returned = EmptyRows(ctx, rows, e.sent_rows);
  mesh_.expert_group().AllToAll(sorted, e.receive_counts, returned, e.send_counts);
  return returned;
}

nn::TokenDispatcher::Dispatched ExpertParallelDispatcher::Dispatch(
    const ops::Context& ctx, const Tensor& x, const Tensor& experts, const Tensor& probs,
    const std::optional<QuantizedLayout>& row_codes) {
  ops::WorkRecorder* const recorder = ops::WorkRecorderOf(ctx);
  if (peers_ && in_step_) {
    Dispatched d = peers_->Dispatch(ctx, x, experts, probs, row_codes);
    if (recorder != nullptr) {  // with even routing
      recorder->set_rows_in_use(static_cast<double>(experts.numel()) /
                                static_cast<double>(d.rows.data.dim(0)));
    }
    return d;
  }
  if (recorder != nullptr) recorder->set_rows_in_use(1);
  const std::int64_t ranks = mesh_.ep(), local_experts = num_experts_ / ranks;
  auto e = std::make_shared<Exchange>();
  e->map = ops::BuildRowMap(ctx, experts, num_experts_);
  e->tokens = x.dim(0);

  const std::vector<std::int64_t> each(static_cast<std::size_t>(ranks), local_experts);
  // What this rank sends, and what it receives. A GPU's host reads both here, and waits: once a
  // layer, since backward knows them.
  const Tensor counts = ctx.Empty({2, num_experts_}, DType::kI64);
  CopyTo(e->map.split_sizes, counts.Select(0));
  mesh_.expert_group().AllToAll(counts.Select(0), each, counts.Select(1), each);
  const Tensor known = counts.ToHost();
  const auto sent_counts = known.Select(0).span<std::int64_t>();
  const auto received_counts = known.Select(1).span<std::int64_t>();
  const auto sum_by_rank = [&](std::span<const std::int64_t> of) {
    std::vector<std::int64_t> sums;
    for (auto at = of.begin(); at != of.end(); at += local_experts) {
      sums.push_back(std::accumulate(at, at + local_experts, std::int64_t{0}));
    }
    return sums;
  };
  e->send_counts = sum_by_rank(sent_counts);
  e->receive_counts = sum_by_rank(received_counts);
  e->sent_rows = std::accumulate(e->send_counts.begin(), e->send_counts.end(), std::int64_t{0});
  e->received_rows =
      std::accumulate(e->receive_counts.begin(), e->receive_counts.end(), std::int64_t{0});
  e->local = SortByExpert(ctx, received_counts, ranks, local_experts, e->received_rows);

  const Tensor sent = EmptyRows(ctx, x, e->sent_rows);
  ops::Permute(ctx, e->map, x, ops::Write(sent));
  const Tensor sent_probs = ctx.Empty({e->sent_rows}, probs.dtype());
  ops::PermuteSlots(ctx, e->map, probs, ops::Write(sent_probs));
  Dispatched d;
  const bool quantized = quantized_rows_ && row_codes.has_value();
  d.rows.data = ToExperts(
      ctx, *e, quantized ? SendQuantized(ctx, *e, sent, *row_codes) : Send(ctx, *e, sent));
  d.rows.split_sizes = e->local.split_sizes;
  d.probs = ToExperts(ctx, *e, Send(ctx, *e, sent_probs));
  d.state = std::move(e);
  return d;
}

Tensor ExpertParallelDispatcher::Combine(const ops::Context& ctx, const State& state,
                                         const Tensor& rows) {
  if (PeerDispatcher::Made(state)) return peers_->Combine(ctx, state, rows);
  const auto& e = static_cast<const Exchange&>(state);
  const Tensor returned = FromExperts(ctx, e, rows);
  const Tensor y = ctx.Empty({e.tokens, rows.dim(1)}, rows.dtype());
  ops::Unpermute(ctx, e.map, returned, Tensor(), ops::Write(y));
  return y;
}

Tensor ExpertParallelDispatcher::CombineBackward(const ops::Context& ctx, const State& state,
                                                 const Tensor& dy) {
  if (PeerDispatcher::Made(state)) return peers_->CombineBackward(ctx, state, dy);
  const auto& e = static_cast<const Exchange&>(state);
  const Tensor sent = EmptyRows(ctx, dy, e.sent_rows);
  ops::Permute(ctx, e.map, dy, ops::Write(sent));
  return ToExperts(ctx, e, Send(ctx, e, sent));
}

nn::TokenDispatcher::Rest ExpertParallelDispatcher::BeginDispatchBackward(
    const ops::Context& ctx, const std::shared_ptr<const State>& state, const Tensor& drows,
    const Tensor& drow_probs) {
  if (PeerDispatcher::Made(*state)) {
    return peers_->BeginDispatchBackward(ctx, state, drows, drow_probs);
  }
  return TokenDispatcher::BeginDispatchBackward(ctx, state, drows, drow_probs);
}

void ExpertParallelDispatcher::DispatchBackward(const ops::Context& ctx, const State& state,
                                                const Tensor& drows, const Tensor& drow_probs,
                                                const ops::Output& dx, const ops::Output& dprobs) {
  if (PeerDispatcher::Made(state)) {
    return peers_->DispatchBackward(ctx, state, drows, drow_probs, dx, dprobs);
  }
  const auto& e = static_cast<const Exchange&>(state);
  ops::Unpermute(ctx, e.map, FromExperts(ctx, e, drows), Tensor(), dx);
  ops::UnpermuteSlots(ctx, e.map, FromExperts(ctx, e, drow_probs), dprobs);
}

}  // namespace cistron::parallel
