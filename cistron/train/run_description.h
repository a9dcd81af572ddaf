// What a run says of itself before its first step.
#pragma once

#include <string>
#include <vector>

#include "cistron/data/corpus.h"
#include "cistron/parallel/expert_parallel_dispatcher.h"
#include "cistron/tensor/device.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

// A line each: the model, the data and what it runs on, which auxiliary losses are part of the
// loss, and what was asked for and has no effect. `experts`: of ranks that share experts, else
// null.
std::vector<std::string> DescribeRun(const RunConfig& config, const data::Corpus& corpus,
                                     const parallel::Mesh& mesh, Device device,
                                     const parallel::ExpertParallelDispatcher* experts);

}  // namespace cistron::train
