#include "cistron/parallel/mesh.h"

#include <fmt/format.h>

#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/comm/self.h"

namespace cistron::parallel {
namespace {

// "dp=4 ep=1, dp=2 ep=2": the layouts of so many ranks that divide the experts.
std::string Layouts(std::int64_t ranks, std::int64_t num_experts) {
  std::vector<std::string> layouts;
  for (std::int64_t ep = 1; ep <= ranks; ++ep) {
    if (ranks % ep != 0 || num_experts % ep != 0) continue;
    layouts.push_back(fmt::format("parallel.dp={} parallel.ep={}", ranks / ep, ep));
  }
  return fmt::format("{}", fmt::join(layouts, ", or "));
}

}  // namespace

Mesh::Mesh() : self_(comm::MakeSelf()), world_(self_.get()) {
  expert_group_ = comm::MakeSelf();
  replica_group_ = comm::MakeSelf();
}

void Mesh::Check(int ranks, std::int64_t dp, std::int64_t ep, std::int64_t num_experts) {
  if (dp < 1 || ep < 1 || dp > ranks || dp * ep != ranks) {
    CISTRON_THROW(kBadInput,
                  "parallel.dp={} times parallel.ep={} must be the number of ranks, which is {}; "
                  "with that number and {} experts: {}",
                  dp, ep, ranks, num_experts, Layouts(ranks, num_experts));
  }
  if (num_experts % ep != 0) {
    CISTRON_THROW(kBadInput,
                  "parallel.ep={}: {} experts cannot be dealt evenly to {} ranks; with {} ranks: "
                  "{}",
                  ep, num_experts, ep, ranks, Layouts(ranks, num_experts));
  }
}

Mesh::Mesh(comm::Communicator& world, std::int64_t dp, std::int64_t ep, std::int64_t num_experts)
    : world_(&world), dp_(dp), ep_(ep) {
  Check(world.size(), dp, ep, num_experts);
  expert_group_ = world.Split(static_cast<int>(dp_index()), static_cast<int>(ep_index()));
  replica_group_ = world.Split(static_cast<int>(ep_index()), static_cast<int>(dp_index()));
}

Mesh::~Mesh() = default;

nn::ParameterPartition Mesh::Partition(bool sharded) const {
  nn::ParameterPartition p{.expert_ranks = ep_,
                           .expert_rank = ep_index(),
                           .counts_dense = is_first(),
                           .counts_experts = dp_index() == 0};
  if (sharded) {
    p.dense = {size(), rank()};
    p.experts = {dp_, dp_index()};
  }
  return p;
}

}  // namespace cistron::parallel
