// Held-out loss: non-overlapping windows, forward strand, first base of each not scored, only the
// alphabet's own letters, every base the same weight, sums in fp64.
#pragma once

#include <cstdint>
#include <functional>

#include "cistron/comm/communicator.h"
#include "cistron/data/stream.h"
#include "cistron/model/mixtral.h"

namespace cistron::train {

struct EvaluationResult {
  double nll = 0;          // Σ over scored bases, nats
  std::int64_t bases = 0;  // scored
  bool complete = true;    // false: a stop was asked for on the way

  double Loss() const;  // nats a base; as the next two not a number where bases = 0
  double Perplexity() const;
  double BitsPerBase() const;
  EvaluationResult& operator+=(const EvaluationResult& other);
};

// Sum of `nll` over the labels that are scored, in order, in fp64.
EvaluationResult SumScored(const Tensor& nll, const Tensor& labels);

// Sees each batch with its routing, i32 [L, T, K].
using RoutingObserver = std::function<void(const data::Batch&, const Tensor& experts)>;

// Evaluates the whole stream, or about `max_tokens` (> 0) tokens of it, evenly spread and always
// the same (all of it where the sample has nothing to score). `batch_tokens` are computed at once.
// `stop_requested` is asked before every batch; true ends the evaluation, incomplete. Throws
// kNumericalFailure when the loss is not finite. With `ranks`, which all call it, the batches are
// dealt to the ranks in turn, and all return the same result; `stop_requested` must answer all
// ranks alike. The observer sees this rank's batches.
EvaluationResult Evaluate(model::Mixtral& model, const data::EvaluationStream& stream,
                          std::int64_t seq_len, std::int64_t max_tokens, std::int64_t batch_tokens,
                          const RoutingObserver& observer = {},
                          const std::function<bool()>& stop_requested = {},
                          comm::Communicator* ranks = nullptr);

}  // namespace cistron::train
