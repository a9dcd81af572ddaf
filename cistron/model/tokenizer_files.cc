#include "cistron/model/tokenizer_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cistron/io/file.h"
#include "cistron/io/json.h"

namespace cistron::model {
namespace {

using nlohmann::json;

struct Special {
  std::int64_t id;
  const char* role;  // key in tokenizer_config.json
};
constexpr Special kSpecials[] = {
    {0, "eos_token"}, {1, "pad_token"}, {2, "bos_token"}, {3, "unk_token"}};

std::string Utf8(int code_point) {
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xc0 | (code_point >> 6)),
          static_cast<char>(0x80 | (code_point & 0x3f))};
}

// GPT-2's map from bytes to printable characters, which `tokenizers` calls ByteLevel: printable
// Latin-1 stands for itself, the others follow at U+0100 in order.
std::string ByteLevelCharacter(int byte) {
  const auto printable = [](int b) {
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
  };
  if (printable(byte)) return Utf8(byte);
  int skipped = 0;
  for (int b = 0; b < byte; ++b) skipped += printable(b) ? 0 : 1;
  return Utf8(0x100 + skipped);
}

std::string TokenOfByte(int byte) {
  return byte < static_cast<int>(std::size(kSpecials)) ? Utf8(byte) : ByteLevelCharacter(byte);
}

json SpecialTokenNames() {
  json names = json::object();
  for (const Special& special : kSpecials) {
    names[special.role] = TokenOfByte(static_cast<int>(special.id));
  }
  return names;
}

json AddedToken(const Special& special) {
  return {{"content", TokenOfByte(static_cast<int>(special.id))},
          {"single_word", false},
          {"lstrip", false},
          {"rstrip", false},
          {"normalized", false},
          {"special", true}};
}

std::string Text(const json& document) {
  return io::DumpJson(document, 2) + "\n";
}

}  // namespace

std::string GenerationConfigJson(const MixtralConfig& config) {
  json document = {{"_from_model_config", true},
                   {"output_attentions", false},
                   {"output_hidden_states", false},
                   {"transformers_version", kTransformersVersion},
                   {"use_cache", true}};
  if (config.bos_token_id) document["bos_token_id"] = *config.bos_token_id;
  if (config.eos_token_id) document["eos_token_id"] = *config.eos_token_id;
  if (config.pad_token_id) document["pad_token_id"] = *config.pad_token_id;
  return Text(document);
}

std::string TokenizerJson(std::int64_t vocab_size) {
  json vocabulary = json::object();
  for (int byte = 0; byte < std::min<std::int64_t>(vocab_size, 256); ++byte) {
    vocabulary[TokenOfByte(byte)] = byte;
  }
  json added = json::array();
  for (const Special& special : kSpecials) {
    json token = AddedToken(special);
    token["id"] = special.id;
    added.push_back(token);
  }
  // No regular expression: a text is cut into bytes and nowhere else.
  const json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", false},
                           {"use_regex", false}};
  return Text({{"version", "1.0"},
               {"truncation", nullptr},
               {"padding", nullptr},
               {"added_tokens", added},
               {"normalizer", nullptr},
               {"pre_tokenizer", byte_level},
               {"post_processor", nullptr},
               {"decoder", byte_level},
               {"model",
                {{"type", "BPE"},
                 {"dropout", nullptr},
                 {"unk_token", TokenOfByte(3)},
                 {"continuing_subword_prefix", nullptr},
                 {"end_of_word_suffix", nullptr},
                 {"fuse_unk", false},
                 {"byte_fallback", false},
                 {"ignore_merges", false},
                 {"vocab", vocabulary},
                 {"merges", json::array()}}}});
}

void WriteTokenizerFiles(const std::filesystem::path& directory, const MixtralConfig& config) {
  json settings = SpecialTokenNames();
  settings["tokenizer_class"] = "PreTrainedTokenizerFast";
  settings["clean_up_tokenization_spaces"] = false;
  settings["model_max_length"] = config.max_position_embeddings;
  settings["model_input_names"] = json::array({"input_ids", "attention_mask"});
  settings["padding_side"] = "right";
  json decoder = json::object();
  for (const Special& special : kSpecials) {
    decoder[std::to_string(special.id)] = AddedToken(special);
  }
  settings["added_tokens_decoder"] = decoder;
  io::WriteNewFile(directory / "tokenizer.json", TokenizerJson(config.vocab_size));
  io::WriteNewFile(directory / "tokenizer_config.json", Text(settings));
  io::WriteNewFile(directory / "special_tokens_map.json", Text(SpecialTokenNames()));
}

}  // namespace cistron::model
