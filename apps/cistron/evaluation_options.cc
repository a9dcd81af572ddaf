#include "apps/cistron/evaluation_options.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "apps/cistron/machine.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/train/model_source.h"

namespace cistron::app {

void EvaluationOptions::Declare(Options& options) {
  options.Positional("MODEL", model_, "Hugging Face directory, checkpoint or run directory");
  options.Option("--data", files_, "FASTA or JSONL files, plain, gzip or bgzip");
  options.Option("--seq-len", seq_len_, "tokens of a window; 0: as the model was trained");
  options.Choice("--alphabet", alphabet_, {"", "dna", "rna", "protein", "bytes"},
                 "letters of the files; empty: as the model was trained");
  options.Option("--tag-delimiters", tag_delimiters_,
                 "bytes, as #; text between two of the same is not scored; empty: as trained");
  options.Option("--json-field", json_field_,
                 "field of JSONL records; empty: as the model was trained");
  options.Choice(
      "--precision", precision_,
      {"fp32", "bf16", "fp64", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"},
      "number format; a recipe has the options of the model's own run, where that has it");
  options.Option("--batch-tokens", batch_tokens_, "tokens computed at once");
  options.Choice("--device", device_, {"cpu", "cuda"}, "where to compute");
  options.Option("--threads", threads_, "0: all that the machine grants");
}

void EvaluationOptions::Prepare() {
  if (threads_ > 0) SetNumThreads(static_cast<int>(threads_));
  // fp64 is none of the formats of a run.
  dtype_ = DType::kF64;
  if (precision_ != "fp64") {
    const train::Precision precision = train::ParsePrecision(precision_);
    dtype_ = train::ModelDType(precision);
    recipe_ = train::ReadEvaluationRecipe(model_, precision);
  }
  const model::MixtralConfig config = train::ReadModelConfig(train::FindModel(model_));
  rules_ = train::GetReadingRules(config);
  if (!alphabet_.empty()) rules_.alphabet = data::FindAlphabet(alphabet_).value();
  if (!json_field_.empty()) rules_.json_field = json_field_;
  if (!tag_delimiters_.empty()) rules_.tag_delimiters.clear();
  for (const char byte : tag_delimiters_) rules_.tag_delimiters.emplace_back(1, byte);
  if (seq_len_ != 0) rules_.seq_len = seq_len_;
  if (rules_.seq_len < 2 || rules_.seq_len > config.max_position_embeddings) {
    CISTRON_THROW(kInvalidArgument,
                  "--seq-len={}: not between 2 and the model's "
                  "max_position_embeddings, {}",
                  rules_.seq_len, config.max_position_embeddings);
  }
  const std::int64_t ids = data::SmallestVocabulary(rules_.alphabet);
  if (config.vocab_size < ids) {
    const bool bytes = rules_.alphabet == data::Alphabet::kBytes;
    CISTRON_THROW(kBadInput,
                  "{}: its vocabulary of {} is too small for the alphabet '{}', whose token ids "
                  "are byte values and need {}; give a model with such a vocabulary{}",
                  model_, config.vocab_size, data::AlphabetName(rules_.alphabet), ids,
                  bytes && config.vocab_size >= data::SmallestVocabulary(data::Alphabet::kDna)
                      ? ", or --alphabet for the letters that it knows"
                      : "");
  }
}

std::string EvaluationOptions::FileOption() const {
  if (!alphabet_.empty()) return "--alphabet";
  if (!tag_delimiters_.empty()) return "--tag-delimiters";
  return json_field_.empty() ? "" : "--json-field";
}

std::shared_ptr<const data::Corpus> EvaluationOptions::OpenFile(const std::string& file) const {
  try {
    return data::Corpus::Open(train::WholeFile(file, rules_));
  } catch (const Error& error) {
    std::string message = error.message();
    for (const auto& [key, option] : {std::pair{"data.alphabet=", "--alphabet "},
                                      {"data.alphabet", "--alphabet"},
                                      {"data.json_field", "--json-field"},
                                      {"data.tag_delimiters", "--tag-delimiters"},
                                      {"data.seq_len", "--seq-len"}}) {
      for (std::size_t at; (at = message.find(key)) != std::string::npos;) {
        message.replace(at, std::string_view(key).size(), option);
      }
    }
    throw Error(error.code(), message);
  }
}

std::string Columns(const train::EvaluationResult& r) {
  if (r.bases == 0) return "NA\tNA\tNA";
  return fmt::format("{:.6f}\t{:.6f}\t{:.6f}", r.Loss(), r.Perplexity(), r.BitsPerBase());
}

std::unique_ptr<model::LocalMixtral> EvaluationOptions::Load() const {
  return train::LoadModel(MakeContext(device_), model_, dtype_);
}

}  // namespace cistron::app
