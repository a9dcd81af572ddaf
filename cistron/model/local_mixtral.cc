#include "cistron/model/local_mixtral.h"

#include "cistron/parallel/expert_parallel_dispatcher.h"
#include "cistron/parallel/rank_sums.h"

namespace cistron::model {
namespace {

std::unique_ptr<nn::TokenDispatcher> MakeDispatcher(const parallel::Mesh* mesh,
                                                    std::int64_t num_experts) {
  if (mesh == nullptr || mesh->ep() == 1) {
    return std::make_unique<nn::LocalTokenDispatcher>(num_experts);
  }
  return std::make_unique<parallel::ExpertParallelDispatcher>(*mesh, num_experts);
}

std::unique_ptr<nn::StatisticsReducer> MakeReducer(const parallel::Mesh* mesh) {
  if (mesh == nullptr) return std::make_unique<nn::LocalStatisticsReducer>();
  return std::make_unique<parallel::MeshStatisticsReducer>(*mesh);
}

}  // namespace

LocalMixtral::LocalMixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
                           bool masters, const parallel::Mesh* ranks)
    : mesh(ranks),
      store(ctx, dtype, masters, ranks == nullptr ? nn::ParameterPartition{} : ranks->partition()),
      dispatcher(MakeDispatcher(ranks, config.num_local_experts)),
      statistics(MakeReducer(ranks)),
      model(ctx, config, dtype, store, *dispatcher, *statistics) {}

void LocalMixtral::SumOverRanks(const LossSums& sums) {
  if (mesh != nullptr) parallel::ReduceGradients(*mesh, store);
  model.SumOverRanks(sums);
}

}  // namespace cistron::model
