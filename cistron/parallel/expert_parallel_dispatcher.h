// Token rows to the experts of all ranks of an expert group, and back.
//
// Dispatch: rows are permuted by expert, so that those for one rank lie together; counts are
// exchanged, then exactly the rows that are routed, nothing padded; the receiver brings its rows
// into the order of its experts, and within an expert of the sender's rank and then of the sender's
// order. Where ranks hold consecutive tokens that is the order of one rank that holds them all.
// Combine returns rows the same way. Backward passes are the same exchanges in the other direction.
// Ranks that send or receive nothing take part as all others do.
#pragma once

#include "cistron/nn/token_dispatcher.h"
#include "cistron/parallel/mesh.h"

namespace cistron::parallel {

class ExpertParallelDispatcher final : public nn::TokenDispatcher {
 public:
  // `mesh` must outlive the dispatcher; `num_experts` of all ranks. `quantized_rows`: rows of which
  // nothing but codes is read travel as codes and scales.
  ExpertParallelDispatcher(const Mesh& mesh, std::int64_t num_experts, bool quantized_rows)
      : mesh_(mesh), num_experts_(num_experts), quantized_rows_(quantized_rows) {}
  Dispatched Dispatch(const ops::Context& ctx, const Tensor& x, const Tensor& experts,
                      const Tensor& probs,
                      const std::optional<QuantizedLayout>& row_codes) override;
  Tensor Combine(const ops::Context& ctx, const State& state, const Tensor& rows) override;
  Tensor CombineBackward(const ops::Context& ctx, const State& state, const Tensor& dy) override;
  void DispatchBackward(const ops::Context& ctx, const State& state, const Tensor& drows,
                        const Tensor& drow_probs, const ops::Output& dx,
                        const ops::Output& dprobs) override;

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
};

}  // namespace cistron::parallel
