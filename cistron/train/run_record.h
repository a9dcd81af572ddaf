// What a run left behind in its directory, read back for the report.
//
//   metrics.jsonl      one object a step (fields as in StepRecord); required
//   config.yaml        the effective configuration; shown as it is, and asked for the alphabet
//   baseline.json      Markov models of the same split (markov.h)
//   final.json         {"heldout_loss", "heldout_bits_per_base", "heldout_bases"}: the last weights
//   on the whole held-out part expert_bases.json  {"bases": ["A", "C", "G", "T"], "counts":
//   [layer][expert][base]}: tokens of the held-out part
//                      that a layer's router sent to an expert, by the base at the token's own
//                      position; a token counts once for each of its experts
//   profile.txt        where the time of some steps went; shown as it is
//   machine.json       a flat object of names and values; shown as it is
// All but the first may be missing, and so may fields of a line: they are NaN then. A report is
// wanted most of runs that went wrong, so this reader is milder than the one that resumes a run
// (metrics.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cistron/data/corpus.h"
#include "cistron/train/markov.h"

namespace cistron::train {

inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

struct StepRecord {
  double step = kMissing;
  double tokens_seen = kMissing;
  double loss = kMissing;  // nats
  double aux_loss = kMissing;
  double grad_norm = kMissing;
  double lr = kMissing;
  double step_ms = kMissing;
  double tokens_per_s = kMissing;
  double unpadded_tokens_per_s = kMissing;
  double mfu = kMissing;
  double memory_peak_bytes = kMissing;
  double heldout_loss = kMissing;  // nats; on evaluation steps
  double heldout_bits_per_base = kMissing;
  double heldout_bases = kMissing;               // scored
  std::vector<double> layer_aux_loss, z_loss;    // [layer], empty when not trained
  std::vector<std::vector<double>> expert_load;  // [layer][expert], empty when missing
};

struct FinalEvaluation {
  double heldout_loss = kMissing;
  double heldout_bits_per_base = kMissing;
  double heldout_bases = kMissing;
};

struct ExpertBases {
  std::vector<std::string> bases;
  std::vector<std::vector<std::vector<double>>> counts;  // [layer][expert][base]
};

struct RunRecord {
  std::string name;               // of the directory
  std::vector<StepRecord> steps;  // ascending; of steps redone after a resume, the last ones
  bool partial_last_line = false;
  std::string config;
  std::string profile;
  // Of the configuration; absent where that is missing or cannot be read.
  std::optional<data::DataConfig> data;
  std::optional<MarkovBaseline> baseline;
  std::optional<FinalEvaluation> final_evaluation;
  std::optional<ExpertBases> expert_bases;
  std::vector<std::pair<std::string, std::string>> machine;

  // DNA where nothing says otherwise.
  data::Alphabet alphabet() const { return data ? data->alphabet : data::Alphabet::kDna; }
  bool holds_out() const { return !data || data->split.kind != data::SplitRule::Kind::kNone; }
  std::size_t layers() const;  // of expert_load; 0 when there is none
  std::size_t experts() const;
};

// Throws kNotFound when the directory or metrics.jsonl is missing, kBadInput with file and line
// when a file is damaged or no step was logged. A last line cut short by a crash is left out.
RunRecord ReadRunRecord(const std::filesystem::path& directory);

// The lines of metrics.jsonl; `origin` names them in errors.
void ParseMetrics(const std::string& text, const std::string& origin, RunRecord& record);

}  // namespace cistron::train
