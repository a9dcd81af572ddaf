// Weights and gradients among the ranks of a mesh.
#pragma once

#include <memory>

#include "cistron/nn/rank_exchange.h"
#include "cistron/parallel/mesh.h"

namespace cistron::parallel {

// Transfers run in the background, in communicators of their own: what the ranks exchange in the
// meantime does not wait for them.
class MeshExchange final : public nn::RankExchange {
 public:
  // Collective.
  explicit MeshExchange(const Mesh& mesh);

  int Ranks(Group group) const override { return Of(group).size(); }
  Wait Sum(Group group, const Tensor& t) override;
  Wait Gather(Group group, const Tensor& shard, std::span<const std::int64_t> counts,
              const Tensor& whole) override;
  Wait ReduceScatter(Group group, const Tensor& whole, std::span<const std::int64_t> counts,
                     const Tensor& shard) override;

 private:
  comm::Communicator& Of(Group group) const { return group == Group::kAll ? *all_ : *replicas_; }
  std::unique_ptr<comm::Communicator> all_, replicas_;
};

}  // namespace cistron::parallel
