#include "cistron/train/reading_rules.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

using nlohmann::json;

constexpr const char* kField = "cistron";

}  // namespace

ReadingRules RulesOf(const data::DataConfig& data) {
  return {data.seq_len,   data.alphabet,       data.upper_case, data.begin_token,
          data.end_token, data.tag_delimiters, data.json_field};
}

void SetReadingRules(model::MixtralConfig& config, const ReadingRules& rules) {
  json extra = json::parse(config.extra_json);
  // Delimiters as numbers: a byte need not be UTF-8.
  json delimiters = json::array();
  for (const std::string& d : rules.tag_delimiters) {
    delimiters.push_back(static_cast<int>(static_cast<unsigned char>(d.at(0))));
  }
  extra[kField] = {
      {"seq_len", rules.seq_len},       {"alphabet", data::AlphabetName(rules.alphabet)},
      {"upper_case", rules.upper_case}, {"begin_token", rules.begin_token},
      {"end_token", rules.end_token},   {"tag_delimiters", delimiters},
      {"json_field", rules.json_field}};
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
    const auto known = data::FindAlphabet(alphabet);
    if (!known) {
      CISTRON_THROW(
          kBadInput,
          "config.json: \"{}\": \"alphabet\" is \"{}\", not one of dna, rna, protein, bytes",
          kField, alphabet);
    }
    rules.alphabet = *known;
    rules.upper_case = field.at("upper_case");
    rules.begin_token = field.at("begin_token");
    rules.end_token = field.at("end_token");
    // Models written before these two existed lack them.
    for (const json& byte : field.value("tag_delimiters", json::array())) {
      rules.tag_delimiters.emplace_back(1, static_cast<char>(byte.get<unsigned char>()));
    }
    rules.json_field = field.value("json_field", std::string());
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
  config.tag_delimiters = rules.tag_delimiters;
  config.json_field = rules.json_field;
  config.reverse_complement = 0;
  return config;
}

}  // namespace cistron::train
