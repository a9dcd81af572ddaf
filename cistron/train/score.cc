#include "cistron/train/score.h"

#include <algorithm>

namespace cistron::train {

void ScoreRecords(model::Mixtral& model, const data::Corpus& corpus,
                  const data::EvaluationStream& stream, std::int64_t batch_tokens,
                  const std::function<void(std::int64_t, const EvaluationResult&)>& record) {
  const std::int64_t batch = std::max<std::int64_t>(1, batch_tokens / corpus.config().seq_len);
  std::int64_t current = 0;  // the record being summed
  EvaluationResult sum;
  const auto finish_before = [&](std::int64_t next) {
    for (; current < next; ++current) {
      record(current, sum);
      sum = {};
    }
  };
  for (std::int64_t begin = 0; begin < stream.num_rows(); begin += batch) {
    const std::int64_t count = std::min(batch, stream.num_rows() - begin);
    const data::Batch b = stream.Rows(begin, count);
    const Tensor nll = model.Evaluate(b);
    std::int64_t token = 0;
    for (std::int64_t row = begin; row < begin + count; ++row) {
      const data::EvaluationRow at = stream.Row(row);
      finish_before(at.record);
      sum += SumScored(nll.Slice(0, token, at.tokens), b.labels.Slice(0, token, at.tokens));
      token += at.tokens;
    }
  }
  finish_before(corpus.num_records());
}

}  // namespace cistron::train
