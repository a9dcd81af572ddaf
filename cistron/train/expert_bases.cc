#include "cistron/train/expert_bases.h"

#include <nlohmann/json.hpp>

#include "cistron/base/error.h"
#include "cistron/io/file.h"

namespace cistron::train {

ExpertBaseCounts::ExpertBaseCounts(std::string bases, std::int64_t layers, std::int64_t experts)
    : bases_(std::move(bases)),
      counts_(static_cast<std::size_t>(layers),
              std::vector<std::vector<std::int64_t>>(static_cast<std::size_t>(experts),
                                                     std::vector<std::int64_t>(bases_.size()))) {}

void ExpertBaseCounts::Add(const data::Batch& batch, const Tensor& experts) {
  CISTRON_CHECK(experts.rank() == 3 && experts.dim(1) == batch.num_tokens() &&
                    experts.dim(0) == static_cast<std::int64_t>(counts_.size()),
                "expert bases: routing {} is not that of {} tokens in {} layers", Describe(experts),
                batch.num_tokens(), counts_.size());
  const auto tokens = batch.tokens.span<std::int64_t>();
  const auto chosen = experts.span<std::int32_t>();
  const auto k = static_cast<std::size_t>(experts.dim(2));
  std::size_t next = 0;
  for (auto& layer : counts_) {
    for (const std::int64_t token : tokens) {
      const std::size_t base =
          token > 0 && token < 128 ? bases_.find(static_cast<char>(token)) : std::string::npos;
      for (std::size_t slot = 0; slot < k; ++slot, ++next) {
        if (base != std::string::npos) ++layer.at(static_cast<std::size_t>(chosen[next]))[base];
      }
    }
  }
}

void ExpertBaseCounts::SumOver(nn::StatisticsReducer& ranks) {
  std::vector<std::int64_t> flat;
  for (const auto& layer : counts_) {
    for (const auto& expert : layer) flat.insert(flat.end(), expert.begin(), expert.end());
  }
  const Tensor sums =
      Tensor::FromSpan<std::int64_t>({static_cast<std::int64_t>(flat.size())}, flat);
  ranks.Sum(std::span(&sums, 1));
  const std::int64_t* next = sums.data<std::int64_t>();
  for (auto& layer : counts_) {
    for (auto& expert : layer) {
      for (std::int64_t& count : expert) count = *next++;
    }
  }
}

std::int64_t ExpertBaseCounts::count(std::int64_t layer, std::int64_t expert,
                                     std::size_t base) const {
  return counts_.at(static_cast<std::size_t>(layer)).at(static_cast<std::size_t>(expert)).at(base);
}

void ExpertBaseCounts::Write(const std::filesystem::path& file) const {
  nlohmann::ordered_json j;
  j["bases"] = nlohmann::ordered_json::array();
  for (const char base : bases_) j["bases"].push_back(std::string(1, base));
  j["counts"] = counts_;
  io::WriteFileAtomically(file, j.dump() + "\n");
}

}  // namespace cistron::train
