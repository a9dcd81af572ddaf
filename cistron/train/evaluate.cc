#include "cistron/train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cistron/base/error.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::train {

double EvaluationResult::Loss() const {
  return bases > 0 ? nll / static_cast<double>(bases) : std::numeric_limits<double>::quiet_NaN();
}
double EvaluationResult::Perplexity() const {
  return std::exp(Loss());
}
double EvaluationResult::BitsPerBase() const {
  return Loss() / std::numbers::ln2;
}
EvaluationResult& EvaluationResult::operator+=(const EvaluationResult& other) {
  nll += other.nll;
  bases += other.bases;
  complete = complete && other.complete;
  return *this;
}

EvaluationResult SumScored(const Tensor& nll, const Tensor& labels) {
  EvaluationResult result;
  const auto label = labels.span<std::int64_t>();
  for (std::size_t t = 0; t < label.size(); ++t) {
    if (label[t] == ops::kIgnoreLabel) continue;
    result.nll += ElementAsDouble(nll, static_cast<std::int64_t>(t));
    ++result.bases;
  }
  return result;
}

namespace {

struct RowRange {
  std::int64_t begin, count;
};

// The batches of an evaluation of `wanted` of the stream's rows.
std::vector<RowRange> CutBatches(std::int64_t rows, std::int64_t wanted, std::int64_t batch) {
  std::vector<RowRange> batches;
  if (wanted == rows) {
    for (std::int64_t begin = 0; begin < rows; begin += batch) {
      batches.push_back({begin, std::min(batch, rows - begin)});
    }
    return batches;
  }
  // Groups of neighbouring rows at even distances: they do not overlap since wanted < rows.
  const std::int64_t groups = (wanted + batch - 1) / batch;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t begin = g * rows / groups;
    const std::int64_t end = (g + 1) * rows / groups;
    batches.push_back({begin, std::min({batch, wanted - g * batch, end - begin})});
  }
  return batches;
}

// The results of all ranks, each batch's on one of them, in the order of batches.
EvaluationResult Sum(std::span<const EvaluationResult> results, comm::Communicator* ranks) {
  const auto n = static_cast<std::int64_t>(results.size());
  const Tensor sums = Tensor::Empty({2 * n}, DType::kF64);
  double* at = sums.data<double>();
  for (const EvaluationResult& r : results) {
    *at++ = r.nll;
    *at++ = static_cast<double>(r.bases);
  }
  // Zeros of the other ranks change no bit.
  if (ranks != nullptr) ranks->AllReduce(sums, comm::ReduceOp::kSum);
  EvaluationResult sum;
  for (std::int64_t i = 0; i < n; ++i) {
    sum.nll += sums.data<double>()[2 * i];
    sum.bases += static_cast<std::int64_t>(sums.data<double>()[2 * i + 1]);
  }
  return sum;
}

}  // namespace

EvaluationResult Evaluate(model::Mixtral& model, const data::EvaluationStream& stream,
                          std::int64_t seq_len, std::int64_t max_tokens, std::int64_t batch_tokens,
                          const RoutingObserver& observer,
                          const std::function<bool()>& stop_requested, comm::Communicator* ranks) {
  const std::int64_t rows = stream.num_rows();
  const std::int64_t batch =
      std::clamp<std::int64_t>(batch_tokens / seq_len, 1, std::max<std::int64_t>(rows, 1));
  const std::int64_t wanted =
      max_tokens > 0 ? std::min(rows, std::max<std::int64_t>(1, max_tokens / seq_len)) : rows;
  const std::vector<RowRange> batches = CutBatches(rows, wanted, batch);
  std::vector<EvaluationResult> results(batches.size());
  const std::size_t rank = ranks == nullptr ? 0 : static_cast<std::size_t>(ranks->rank());
  const std::size_t step = ranks == nullptr ? 1 : static_cast<std::size_t>(ranks->size());
  bool complete = true;
  for (std::size_t round = 0; complete && round < batches.size(); round += step) {
    if (stop_requested && stop_requested()) {
      complete = false;
      break;
    }
    // A rank that has no batch left takes part with another's, since the experts are everyone's.
    const bool mine = round + rank < batches.size();
    const RowRange range = batches[mine ? round + rank : 0];
    const data::Batch b = stream.Rows(range.begin, range.count);
    Tensor experts;
    const EvaluationResult result =
        SumScored(model.Evaluate(b, observer ? &experts : nullptr), b.labels);
    if (!mine) continue;
    results[round + rank] = result;
    if (observer) observer(b, experts);
  }
  EvaluationResult sum = Sum(results, ranks);
  sum.complete = complete;
  if (!std::isfinite(sum.nll)) {
    CISTRON_THROW(kNumericalFailure,
                  "evaluation: the loss is {}; the model's weights or the "
                  "activations are not finite",
                  sum.nll);
  }
  // A sample may lie in a stretch of N.
  if (sum.complete && sum.bases == 0 && wanted < rows) {
    return Evaluate(model, stream, seq_len, 0, batch_tokens, observer, stop_requested, ranks);
  }
  return sum;
}

}  // namespace cistron::train
