// A table a record: how well a model predicts each sequence of a file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cistron/data/stream.h"
#include "cistron/model/mixtral.h"
#include "cistron/train/evaluate.h"

namespace cistron::train {

// Calls `record(index, result)` for every record of the corpus, in order; a record with nothing to
// score has zero bases. Rules of evaluation as in evaluate.h.
void ScoreRecords(model::Mixtral& model, const data::Corpus& corpus,
                  const data::EvaluationStream& stream, std::int64_t batch_tokens,
                  const std::function<void(std::int64_t, const EvaluationResult&)>& record);

}  // namespace cistron::train
