// How a model was trained to read, kept with the model: evaluation must cut and spell sequences the
// same way. Stands in config.json under "cistron"; other software reads past it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cistron/data/alphabet.h"
#include "cistron/data/corpus.h"
#include "cistron/model/mixtral_config.h"

namespace cistron::train {

struct ReadingRules {
  std::int64_t seq_len = 512;
  data::Alphabet alphabet = data::Alphabet::kDna;
  bool upper_case = true;
  bool begin_token = false, end_token = false;
  std::vector<std::string> tag_delimiters;  // one byte each
  std::string json_field;                   // empty: "sequence", or "text"
};

ReadingRules RulesOf(const data::DataConfig& data);
// Adds the rules to the fields that config.json keeps.
void SetReadingRules(model::MixtralConfig& config, const ReadingRules& rules);
// The rules of a model; for one without them DNA in windows of at most 512 tokens.
ReadingRules GetReadingRules(const model::MixtralConfig& config);

// One file, read by the rules, all of it in one part.
data::DataConfig WholeFile(const std::filesystem::path& file, const ReadingRules& rules);

}  // namespace cistron::train
