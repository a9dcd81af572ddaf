// Whether a run can compute, asked before anything of it is written: the implementation of each op
// at the run's own sizes, and how the experts are fused.
#pragma once

#include <vector>

#include "cistron/data/sequence_bounds.h"
#include "cistron/model/mixtral.h"
#include "cistron/ops/support_matrix.h"
#include "cistron/train/run_config.h"

namespace cistron::train {

// The implementations that a training step of the run chooses, where its stream has windows of such
// lengths.
std::vector<ops::OpChoice> ChooseImplementations(const ops::Context& ctx, const RunConfig& config,
                                                 const data::WindowLengths& windows);

// Throws kUnsupported where an op has no implementation that runs, or the one that CISTRON_IMPL
// asks for refuses; under strict=true also where a better one refuses or a fusion of the experts
// does not fire. Names all of them. To be called in the run's quant::Autocast scope.
void CheckImplementations(const ops::Context& ctx, const std::vector<ops::OpChoice>& choices,
                          const model::Mixtral& model);

}  // namespace cistron::train
