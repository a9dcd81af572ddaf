// Sums over ranks: statistics of the router and of a step, and gradients.
#pragma once

#include "cistron/nn/parameter.h"
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

// Makes the gradients of a step those of the global batch, with the same bits on every rank that
// holds the parameter: sums over all ranks for dense ones, over those with the same experts for
// experts. Each rank's gradient is already that of the global mean loss by its own tokens, so
// nothing is divided. Once a step, after its last micro-batch; a parameter that got no gradient on
// any rank has none.
void ReduceGradients(const Mesh& mesh, nn::LocalParameterStore& store);

}  // namespace cistron::parallel
