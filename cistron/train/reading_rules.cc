#include "cistron/train/reading_rules.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

using nlohmann::json;

constexpr const char* kField = "cistron";
constexpr data::Alphabet kAlphabets[] = {data::Alphabet::kDna, data::Alphabet::kRna,
                                         data::Alphabet::kProtein, data::Alphabet::kBytes};

}  // namespace

ReadingRules RulesOf(const data::DataConfig& data) {
  return {data.seq_len, data.alphabet, data.upper_case, data.begin_token, data.end_token};
}

void SetReadingRules(model::MixtralConfig& config, const ReadingRules& rules) {
  json extra = json::parse(config.extra_json);
  extra[kField] = {{"seq_len", rules.seq_len},
                   {"alphabet", data::AlphabetName(rules.alphabet)},
                   {"upper_case", rules.upper_case},
                   {"begin_token", rules.begin_token},
                   {"end_token", rules.end_token}};
  config.extra_json = extra.dump();
}

ReadingRules GetReadingRules(const model::MixtralConfig& config) {
  ReadingRules rules;
  rules.seq_len = std::min<std::int64_t>(rules.seq_len, config.max_position_embeddings);
  const json extra = json::parse(config.extra_json);
  if (!extra.contains(kField)) return rules;
  try {
    const json& field = extra.at(kField);
    rules.seq_len = field.at("seq_len");
    const std::string alphabet = field.at("alphabet");
    for (const data::Alphabet a : kAlphabets) {
      if (data::AlphabetName(a) == alphabet) rules.alphabet = a;
    }
    rules.upper_case = field.at("upper_case");
    rules.begin_token = field.at("begin_token");
    rules.end_token = field.at("end_token");
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput, "config.json: the field \"{}\" is damaged: {}", kField, error.what());
  }
  return rules;
}

data::DataConfig WholeFile(const std::filesystem::path& file, const ReadingRules& rules) {
  data::DataConfig config;
  config.train = {{file, 1.0}};
  config.split.kind = data::SplitRule::Kind::kNone;
  config.seq_len = rules.seq_len;
  config.alphabet = rules.alphabet;
  config.upper_case = rules.upper_case;
  config.begin_token = rules.begin_token;
  config.end_token = rules.end_token;
  config.reverse_complement = 0;
  return config;
}

}  // namespace cistron::train
