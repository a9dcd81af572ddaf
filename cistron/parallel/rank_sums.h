// Over ranks: sums of statistics of the router and of a step, and amax.
#pragma once

#include "cistron/nn/statistics_reducer.h"
#include "cistron/parallel/mesh.h"
#include "cistron/quant/amax_reducer.h"

namespace cistron::parallel {

// Over all ranks of the mesh, in the order of ranks.
class MeshStatisticsReducer final : public nn::StatisticsReducer {
 public:
  explicit MeshStatisticsReducer(const Mesh& mesh) : mesh_(mesh) {}
  void Sum(std::span<const Tensor> tensors) override;

 private:
  const Mesh& mesh_;
};

// Over all ranks for dense layers, over those with the same experts for experts.
class MeshAmaxReducer final : public quant::AmaxReducer {
 public:
  explicit MeshAmaxReducer(const Mesh& mesh) : mesh_(mesh) {}
  void Max(const Tensor& amax, quant::TensorSharing sharing) override;

 private:
  const Mesh& mesh_;
};

}  // namespace cistron::parallel
