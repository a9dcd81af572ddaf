#include "cistron/parallel/mesh_exchange.h"

namespace cistron::parallel {
namespace {

nn::RankExchange::Wait WaitFor(comm::Work work) {
  return [work = std::move(work)] { work.Wait(); };
}

}  // namespace

MeshExchange::MeshExchange(const Mesh& mesh)
    : all_(mesh.world().Split(0, mesh.rank(), "all ranks' parameters")),
      replicas_(mesh.world().Split(static_cast<int>(mesh.ep_index()),
                                   static_cast<int>(mesh.dp_index()), "replicas of experts")) {}

nn::RankExchange::Wait MeshExchange::Sum(Group group, const Tensor& t) {
  return WaitFor(Of(group).AllReduceAsync(t, comm::ReduceOp::kSum));
}

nn::RankExchange::Wait MeshExchange::Gather(Group group, const Tensor& shard,
                                            std::span<const std::int64_t> counts,
                                            const Tensor& whole) {
  return WaitFor(Of(group).AllGatherAsync(shard, whole, counts));
}

nn::RankExchange::Wait MeshExchange::ReduceScatter(Group group, const Tensor& whole,
                                                   std::span<const std::int64_t> counts,
                                                   const Tensor& shard) {
  return WaitFor(Of(group).ReduceScatterAsync(whole, shard, comm::ReduceOp::kSum, counts));
}

}  // namespace cistron::parallel
