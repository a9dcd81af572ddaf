// Small files of a Hugging Face directory: generation_config.json and the byte tokenizer.
//
// The tokenizer is the field's for nucleotides: one byte one token, the id is the byte, 0 end, 1
// pad, 2 begin, 3 unknown. In `tokenizers` it is a BPE without merges over byte-level characters:
// bytes 4 and above stand under the characters that byte-level models give them; bytes 0 to 3 stand
// under themselves, since the strings of special tokens are matched in the raw text. Nothing is
// added to a text: no begin, no end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "cistron/model/mixtral_config.h"

namespace cistron::model {

// With fewer tokens a model has no use for a tokenizer of ASCII; a larger vocabulary is that of
// another tokenizer (256, rounded up for the hardware, is ours).
inline constexpr std::int64_t kSmallestVocabulary = 128;
inline constexpr std::int64_t kLargestVocabulary = 1024;

// generation_config.json as save_pretrained derives it from the model's config.
std::string GenerationConfigJson(const MixtralConfig& config);

// tokenizer.json for a vocabulary of `vocab_size` ids; bytes beyond it are unknown.
std::string TokenizerJson(std::int64_t vocab_size);

// tokenizer.json, tokenizer_config.json and special_tokens_map.json, into a directory.
void WriteTokenizerFiles(const std::filesystem::path& directory, const MixtralConfig& config);

}  // namespace cistron::model
