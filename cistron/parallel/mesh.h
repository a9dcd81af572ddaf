// The mesh of ranks: dp × ep, row-major, so that rank = dp_index·ep + ep_index.
//
// Every rank reads other tokens. Experts are divided evenly over the ep ranks of a row, which
// exchange token rows (an expert group); the dp ranks of a column hold the same experts (a replica
// group). Dense parameters are the same on all ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "cistron/comm/communicator.h"
#include "cistron/nn/parameter.h"

namespace cistron::parallel {

class Mesh {
 public:
  // One rank by itself.
  Mesh();
  // Throws kBadInput where dp·ep is not the number of ranks, or ep does not divide `num_experts`,
  // with the layouts that would do.
  static void Check(int ranks, std::int64_t dp, std::int64_t ep, std::int64_t num_experts);
  // `world` must outlive the mesh. Every rank of it must make one, with the same sizes, which are
  // checked.
  Mesh(comm::Communicator& world, std::int64_t dp, std::int64_t ep, std::int64_t num_experts);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  bool is_first() const { return rank() == 0; }
  std::int64_t dp() const { return dp_; }
  std::int64_t ep() const { return ep_; }
  std::int64_t dp_index() const { return rank() / ep_; }
  std::int64_t ep_index() const { return rank() % ep_; }

  comm::Communicator& world() const { return *world_; }
  comm::Communicator& expert_group() const { return *expert_group_; }
  comm::Communicator& replica_group() const { return *replica_group_; }

  // What of the parameters is here. `sharded`: ranks that would hold the same values cut them into
  // shards: dense parameters over all ranks, experts over the replica group.
  nn::ParameterPartition Partition(bool sharded) const;

 private:
  std::unique_ptr<comm::Communicator> self_;
  comm::Communicator* world_;
  std::int64_t dp_ = 1, ep_ = 1;
  std::unique_ptr<comm::Communicator> expert_group_, replica_group_;
};

}  // namespace cistron::parallel
