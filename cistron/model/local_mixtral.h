// A Mixtral on one device, or one rank's part of it: the model with its store, dispatcher and
// reducer.
#pragma once

#include <memory>

#include "cistron/model/mixtral.h"
#include "cistron/parallel/expert_parallel_dispatcher.h"
#include "cistron/parallel/mesh.h"

namespace cistron::model {

// How ranks that train together hold and exchange a model's tensors.
struct RankOptions {
  bool sharded = false;         // Mesh::Partition
  bool quantized_rows = false;  // ExpertParallelDispatcher
  parallel::ExpertExchange expert_exchange{};
};

struct LocalMixtral {
  // `masters`: of LocalParameterStore. `ranks`, which must outlive the model: the mesh of those
  // that train it together, each of which makes one; null: this one alone.
  LocalMixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
               bool masters = true, const parallel::Mesh* ranks = nullptr,
               const RankOptions& options = {});
  LocalMixtral(const LocalMixtral&) = delete;  // the model refers to its neighbours
  LocalMixtral& operator=(const LocalMixtral&) = delete;

  // After the last micro-batch of a step: gradients and sums become those of the global batch.
  void SumOverRanks(const LossSums& sums);

  const parallel::Mesh* mesh;
  std::unique_ptr<nn::RankExchange> exchange;  // null for one rank
  nn::LocalParameterStore store;
  std::unique_ptr<nn::TokenDispatcher> dispatcher;
  parallel::ExpertParallelDispatcher* expert_ranks;  // the dispatcher, where ranks share experts
  std::unique_ptr<nn::StatisticsReducer> statistics;
  Mixtral model;
};

}  // namespace cistron::model
