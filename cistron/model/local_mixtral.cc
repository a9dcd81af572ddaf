#include "cistron/model/local_mixtral.h"

#include "cistron/parallel/mesh_exchange.h"
#include "cistron/parallel/rank_sums.h"

namespace cistron::model {
namespace {

std::unique_ptr<nn::TokenDispatcher> MakeDispatcher(const parallel::Mesh* mesh,
                                                    const ops::Context& ctx,
                                                    std::int64_t num_experts,
                                                    const RankOptions& options) {
  if (mesh == nullptr || mesh->ep() == 1) {
    return std::make_unique<nn::LocalTokenDispatcher>(num_experts);
  }
  return std::make_unique<parallel::ExpertParallelDispatcher>(
      *mesh, ctx, num_experts, options.quantized_rows, options.expert_exchange);
}

std::unique_ptr<nn::StatisticsReducer> MakeReducer(const parallel::Mesh* mesh) {
  if (mesh == nullptr) return std::make_unique<nn::LocalStatisticsReducer>();
  return std::make_unique<parallel::MeshStatisticsReducer>(*mesh);
}

std::unique_ptr<nn::RankExchange> MakeExchange(const parallel::Mesh* mesh) {
  if (mesh == nullptr || mesh->size() == 1) return nullptr;
  return std::make_unique<parallel::MeshExchange>(*mesh);
}

nn::ParameterPartition PartitionOf(const parallel::Mesh* mesh, bool sharded,
                                   nn::RankExchange* exchange) {
  nn::ParameterPartition partition =
      mesh == nullptr ? nn::ParameterPartition{} : mesh->Partition(sharded);
  partition.exchange = exchange;
  return partition;
}

}  // namespace

LocalMixtral::LocalMixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
                           bool masters, const parallel::Mesh* ranks, const RankOptions& options)
    : mesh(ranks),
      exchange(MakeExchange(ranks)),
      store(ctx, dtype, masters, PartitionOf(ranks, options.sharded, exchange.get())),
      dispatcher(MakeDispatcher(ranks, ctx, config.num_local_experts, options)),
      expert_ranks(dynamic_cast<parallel::ExpertParallelDispatcher*>(dispatcher.get())),
      statistics(MakeReducer(ranks)),
      model(ctx, config, dtype, store, *dispatcher, *statistics) {}

void LocalMixtral::SumOverRanks(const LossSums& sums) {
  store.FinishGradients();
  model.SumOverRanks(sums);
}

}  // namespace cistron::model
