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

EvaluationResult Evaluate(model::Mixtral& model, const data::EvaluationStream& stream,
                          std::int64_t seq_len, std::int64_t max_tokens, std::int64_t batch_tokens,
                          const RoutingObserver& observer,
                          const std::function<bool()>& stop_requested) {
  const std::int64_t rows = stream.num_rows();
  const std::int64_t batch =
      std::clamp<std::int64_t>(batch_tokens / seq_len, 1, std::max<std::int64_t>(rows, 1));
  const std::int64_t wanted =
      max_tokens > 0 ? std::min(rows, std::max<std::int64_t>(1, max_tokens / seq_len)) : rows;
  EvaluationResult sum;
  const auto add = [&](std::int64_t begin, std::int64_t count) {
    if (stop_requested && stop_requested()) sum.complete = false;
    if (!sum.complete) return;
    const data::Batch b = stream.Rows(begin, count);
    Tensor experts;
    sum += SumScored(model.Evaluate(b, observer ? &experts : nullptr), b.labels);
    if (observer) observer(b, experts);
  };
  if (wanted == rows) {
    for (std::int64_t begin = 0; begin < rows; begin += batch) {
      add(begin, std::min(batch, rows - begin));
    }
  } else {
    // Groups of neighbouring rows at even distances: they do not overlap since wanted < rows.
    const std::int64_t groups = (wanted + batch - 1) / batch;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t begin = g * rows / groups;
      const std::int64_t end = (g + 1) * rows / groups;
      add(begin, std::min({batch, wanted - g * batch, end - begin}));
    }
  }
  if (!std::isfinite(sum.nll)) {
    CISTRON_THROW(kNumericalFailure,
                  "evaluation: the loss is {}; the model's weights or the "
                  "activations are not finite",
                  sum.nll);
  }
  // A sample may lie in a stretch of N.
  if (sum.complete && sum.bases == 0 && wanted < rows) {
    return Evaluate(model, stream, seq_len, 0, batch_tokens, observer, stop_requested);
  }
  return sum;
}

}  // namespace cistron::train
