// Options that `eval` and `score` share: the model, the files, how to read them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/cistron/command.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/train/evaluate.h"
#include "cistron/train/evaluation_recipe.h"
#include "cistron/train/reading_rules.h"

namespace cistron::app {

class EvaluationOptions {
 public:
  void Declare(Options& options);
  // Reads the model's configuration and settles the rules; throws before anything is computed.
  void Prepare();
  std::unique_ptr<model::LocalMixtral> Load() const;
  // The recipe of --precision, to be kept open around the evaluation.
  quant::Autocast Recipe() { return quant::Autocast(recipe_.recipe, recipe_.Scope()); }

  const std::string& model_path() const { return model_; }
  const std::vector<std::string>& files() const { return files_; }
  // A file under the rules; errors name options of the command line, not keys of a configuration.
  std::shared_ptr<const data::Corpus> OpenFile(const std::string& file) const;
  const train::ReadingRules& rules() const { return rules_; }
  // An option given that says how files are read, "--alphabet"; empty when there is none.
  std::string FileOption() const;
  // "base", "residue" or "byte", which names columns.
  std::string_view unit() const { return data::UnitName(rules_.alphabet); }
  std::int64_t batch_tokens() const { return batch_tokens_; }

 private:
  std::string model_, precision_ = "fp32", device_ = "cpu", alphabet_, tag_delimiters_, json_field_;
  std::vector<std::string> files_;
  std::int64_t seq_len_ = 0, batch_tokens_ = 4096, threads_ = 0;
  DType dtype_ = DType::kF32;
  train::EvaluationRecipe recipe_;
  train::ReadingRules rules_;
};

// Loss, perplexity and bits per base as columns; NA where nothing was scored.
std::string Columns(const train::EvaluationResult& result);

}  // namespace cistron::app
