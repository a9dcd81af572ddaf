// Token rows to the experts of all ranks of an expert group, and back.
//
// Dispatch: rows are permuted by expert, so that those for one rank lie together; counts are
// exchanged, then exactly the rows that are routed, nothing padded; the receiver brings its rows
// into the order of its experts, and within an expert of the sender's rank and then of the sender's
// order. Where ranks hold consecutive tokens that is the order of one rank that holds them all.
// Combine returns rows the same way. Backward passes are the same exchanges in the other direction.
// Ranks that send or receive nothing take part as all others do.
//
// The host of each rank reads how many rows it receives, and waits for that once a layer. Between
// GPUs that reach each other's memory steps of training do without (peer_dispatcher.h).
#pragma once

#include <memory>
#include <string>

#include "cistron/nn/token_dispatcher.h"
#include "cistron/parallel/mesh.h"
#include "cistron/parallel/peer_dispatcher.h"

namespace cistron::parallel {

struct ExpertExchange {
  // Why the hosts count the rows, for people; empty: they do only where GPUs do not reach each
  // other's memory. Steps in 8 bits need it, since they cannot be made again.
  std::string why_by_host = "parallel.ep_sync=host";
  double buffer_factor = 1.5;  // parallel.ep_buffer_factor
  double limit_s = 600;        // parallel.timeout
};

class ExpertParallelDispatcher final : public nn::TokenDispatcher {
 public:
  // `mesh` must outlive the dispatcher; `num_experts` of all ranks. `quantized_rows`: rows of which
  // nothing but codes is read travel as codes and scales, where the host counts them. Collective.
  ExpertParallelDispatcher(const Mesh& mesh, const ops::Context& ctx, std::int64_t num_experts,
                           bool quantized_rows, const ExpertExchange& exchange = {});
  Dispatched Dispatch(const ops::Context& ctx, const Tensor& x, const Tensor& experts,
                      const Tensor& probs,
                      const std::optional<QuantizedLayout>& row_codes) override;
  Tensor Combine(const ops::Context& ctx, const State& state, const Tensor& rows) override;
  Tensor CombineBackward(const ops::Context& ctx, const State& state, const Tensor& dy) override;
  void DispatchBackward(const ops::Context& ctx, const State& state, const Tensor& drows,
                        const Tensor& drow_probs, const ops::Output& dx,
                        const ops::Output& dprobs) override;

  Rest BeginDispatchBackward(const ops::Context& ctx, const std::shared_ptr<const State>& state,
                             const Tensor& drows, const Tensor& drow_probs) override;
  bool SendsBeside(const State& state) const override { return PeerDispatcher::Made(state); }

  // Of ranks that exchange without their hosts; else null, and `why_by_host` says why: empty on a
  // CPU.
  PeerDispatcher* peers() const { return peers_.get(); }
  const std::string& why_by_host() const { return why_by_host_; }
  // PeerDispatcher's, kept where there is none too: a checkpoint takes it from layout to layout.
  double buffer_factor() const { return peers_ ? peers_->factor() : buffer_factor_; }
  void RaiseBufferFactor(double factor);
  // While it lives, dispatches are those of peers(), where there are any: of a step whose status is
  // looked at. Everything else, evaluations for one, takes exact counts.
  class Step {
   public:
    explicit Step(ExpertParallelDispatcher* of) : of_(of) {
      if (of_ != nullptr) of_->in_step_ = true;
    }
    ~Step() {
      if (of_ != nullptr) of_->in_step_ = false;
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    ExpertParallelDispatcher* of_;
  };

 private:
  struct Exchange;
  Tensor Send(const ops::Context& ctx, const Exchange& e, const Tensor& sent) const;
  Tensor SendQuantized(const ops::Context& ctx, const Exchange& e, const Tensor& sent,
                       const QuantizedLayout& layout) const;
  Tensor ToExperts(const ops::Context& ctx, const Exchange& e, const Tensor& received) const;
  Tensor FromExperts(const ops::Context& ctx, const Exchange& e, const Tensor& rows) const;

  const Mesh& mesh_;
  std::int64_t num_experts_;
  bool quantized_rows_;
  std::unique_ptr<PeerDispatcher> peers_;
  std::string why_by_host_;
  double buffer_factor_;
  bool in_step_ = false;
};

}  // namespace cistron::parallel
