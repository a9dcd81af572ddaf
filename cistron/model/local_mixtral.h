// A Mixtral on one device, or one rank's part of it: the model with its store, dispatcher and
// reducer.
#pragma once

#include <memory>

#include "cistron/model/mixtral.h"
#include "cistron/parallel/mesh.h"

namespace cistron::model {

struct LocalMixtral {
  // `masters`: of LocalParameterStore. `mesh`, which must outlive the model: of the ranks that
  // train it together; null: this one alone.
  LocalMixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
               bool masters = true, const parallel::Mesh* mesh = nullptr);
  LocalMixtral(const LocalMixtral&) = delete;  // the model refers to its neighbours
  LocalMixtral& operator=(const LocalMixtral&) = delete;

  // After the last micro-batch of a step: gradients and sums become those of the global batch.
  void SumOverRanks(const LossSums& sums);

  const parallel::Mesh* mesh;
  nn::LocalParameterStore store;
  std::unique_ptr<nn::TokenDispatcher> dispatcher;
  std::unique_ptr<nn::StatisticsReducer> statistics;
  Mixtral model;
};

}  // namespace cistron::model
