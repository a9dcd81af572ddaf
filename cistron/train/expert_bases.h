// Which base each expert serves: routing of a part's tokens, counted by expert and base.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/nn/statistics_reducer.h"
#include "cistron/tensor/tensor.h"

namespace cistron::train {

// counts[layer][expert][base]: tokens that a layer's router sent to an expert, by the base at the
// token's own position; a token counts once for each of its experts.
class ExpertBaseCounts {
 public:
  ExpertBaseCounts(std::string bases, std::int64_t layers, std::int64_t experts);

  // `experts`: i32 [L, T, K], as Mixtral::Evaluate gives them. Tokens of other letters are not
  // counted.
  void Add(const data::Batch& batch, const Tensor& experts);
  // The counts of all ranks, on each.
  void SumOver(nn::StatisticsReducer& ranks);
  std::int64_t count(std::int64_t layer, std::int64_t expert, std::size_t base) const;

  // expert_bases.json of a run directory.
  void Write(const std::filesystem::path& file) const;

 private:
  std::string bases_;
  std::vector<std::vector<std::vector<std::int64_t>>> counts_;
};

}  // namespace cistron::train
