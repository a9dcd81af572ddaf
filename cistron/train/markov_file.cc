// baseline.json: {"train_bases": …, "heldout_bases": …, "scores": [{"order", "both_strands",
// "smoothing", "prior", "bits_per_base"}, …]}
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cistron/base/error.h"
#include "cistron/io/file.h"
#include "cistron/train/markov.h"

namespace cistron::train {

using nlohmann::json;

void WriteBaseline(const std::filesystem::path& path, const MarkovBaseline& baseline) {
  json scores = json::array();
  for (const MarkovScore& score : baseline.scores) {
    scores.push_back(
        {{"order", score.order},
         {"both_strands", score.both_strands},
         {"smoothing", score.smoothing == MarkovSmoothing::kAdd ? "add" : "interpolated"},
         {"prior", score.prior},
         {"bits_per_base", score.bits_per_base}});
  }
  const json document = {{"train_bases", baseline.train_bases},
                         {"heldout_bases", baseline.heldout_bases},
                         {"scores", scores}};
  io::WriteFileAtomically(path, document.dump(1) + "\n");
}

MarkovBaseline ReadBaseline(const std::filesystem::path& path) {
  const std::string text = io::ReadFile(path);
  try {
    const json document = json::parse(text);
    MarkovBaseline baseline;
    baseline.train_bases = document.at("train_bases").get<std::int64_t>();
    baseline.heldout_bases = document.at("heldout_bases").get<std::int64_t>();
    for (const json& entry : document.at("scores")) {
      MarkovScore score;
      score.order = entry.at("order").get<int>();
      score.both_strands = entry.at("both_strands").get<bool>();
      const auto smoothing = entry.at("smoothing").get<std::string>();
      if (smoothing != "add" && smoothing != "interpolated") {
        CISTRON_THROW(kBadInput, "{}: smoothing \"{}\" is neither \"add\" nor \"interpolated\"",
                      path.string(), smoothing);
      }
      score.smoothing = smoothing == "add" ? MarkovSmoothing::kAdd : MarkovSmoothing::kInterpolated;
      score.prior = entry.at("prior").get<double>();
      score.bits_per_base = entry.at("bits_per_base").get<double>();
      baseline.scores.push_back(score);
    }
    return baseline;
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput,
                  "{}: not a baseline file: {}; run `cistron baseline` to write it again",
                  path.string(), error.what());
  }
}

}  // namespace cistron::train
