// Token rows to the experts of ranks whose GPUs reach each other's memory, and back, without the
// host (row_exchange.h): what ExpertParallelDispatcher does in steps that can be made again.
//
// Buffers have a fixed number of rows, BufferRows of exchange_plan.h. Where a rank would receive
// more, nobody sends any and the status says so: what the step computes from then on means nothing,
// no token has been dropped from a step that counts, and whoever runs it grows the buffers and
// makes it again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "cistron/nn/token_dispatcher.h"
#include "cistron/parallel/mesh.h"
#include "cistron/parallel/row_exchange.h"

namespace cistron::parallel {

class PeerDispatcher final : public nn::TokenDispatcher {
 public:
  // Collective over the expert group, of which comm::nccl::WhyNoPeers says nothing. `mesh` must
  // outlive the dispatcher. All ranks compute as many tokens at once.
  PeerDispatcher(const Mesh& mesh, const ops::Context& ctx, std::int64_t num_experts, double factor,
                 double limit_s);

  Dispatched Dispatch(const ops::Context& ctx, const Tensor& x, const Tensor& experts,
                      const Tensor& probs,
                      const std::optional<QuantizedLayout>& row_codes) override;
  Tensor Combine(const ops::Context& ctx, const State& state, const Tensor& rows) override;
  Tensor CombineBackward(const ops::Context& ctx, const State& state, const Tensor& dy) override;
  void DispatchBackward(const ops::Context& ctx, const State& state, const Tensor& drows,
                        const Tensor& drow_probs, const ops::Output& dx,
                        const ops::Output& dprobs) override;
  // Sends rows back beside what is queued next.
  Rest BeginDispatchBackward(const ops::Context& ctx, const std::shared_ptr<const State>& state,
                             const Tensor& drows, const Tensor& drow_probs) override;
  bool SendsBeside(const State&) const override { return true; }
  // Whether a dispatch of this one made the state.
  static bool Made(const State& state);

  // RowExchange's.
  Tensor status() const { return exchange_->status(); }
  Tensor needed() const { return exchange_->needed(); }
  std::string WaitsFor() const { return exchange_->WaitsFor(); }
  void Reset() { exchange_->Reset(); }
  // Collective over the expert group, while no state or row of a dispatch is there any more: larger
  // buffers, after an overflow that needed so many rows. Returns how many rows they will have.
  std::int64_t Grow(std::int64_t needed);
  // What buffers are of an even share: that of the constructor, or what Grow made of it.
  double factor() const { return factor_; }
  // Of the next dispatches, the same on every rank.
  void RaiseFactor(double factor) { factor_ = std::max(factor_, factor); }
  AllocatorStats Stats() const { return exchange_->Stats(); }

 private:
  struct Exchanged;
  const Mesh& mesh_;
  const ops::Context ctx_;
  const std::int64_t num_experts_;
  const double limit_s_;
  double factor_;
  std::int64_t tokens_ = 0, top_k_ = 0;  // of the last dispatch
  std::unique_ptr<RowExchange> exchange_;
};

}  // namespace cistron::parallel
