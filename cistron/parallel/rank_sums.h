// Sums over ranks of statistics: of the router, and of a step.
#pragma once

#include "cistron/nn/statistics_reducer.h"
#include "cistron/parallel/mesh.h"

namespace cistron::parallel {

// Over all ranks of the mesh, in the order of ranks.
class MeshStatisticsReducer final : public nn::StatisticsReducer {
 public:
  explicit MeshStatisticsReducer(const Mesh& mesh) : mesh_(mesh) {}
  void Sum(std::span<const Tensor> tensors) override;

 private:
  const Mesh& mesh_;
};

}  // namespace cistron::parallel
