// metrics.jsonl: one JSON object a step, in order, no step twice.
//
//   {"step": 1, "tokens_seen": 2048, "loss": …, "aux_loss": …, "grad_norm": …, "lr": …, "step_ms":
//   …,
//    "tokens_per_s": …, "unpadded_tokens_per_s": …, "flops_per_s": …, "mfu": …,
//    "memory_peak_bytes": …,
//    "layer_aux_loss": [L], "z_loss": [L],
//    "load_entropy": [L], "expert_load": [L][E], "heldout_loss": …, "heldout_bits_per_base": …}
// loss is the cross-entropy (weighted mean over the global batch, nats), without the auxiliary
// losses, which stand beside it, without their coefficients: aux_loss is that of
// model.router_aux_loss_coef; layer_aux_loss and z_loss, a value a layer, are there when
// model.moe_aux_loss_coeff and model.moe_z_loss_coeff train them. expert_load is each expert's
// share of a layer's assignments; load_entropy that distribution's entropy over its largest value,
// ln E (1: even). mfu is null on a CPU, whose rate changes with what runs beside. The held-out
// fields are there on steps that evaluated.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cistron::train {

struct HeldoutMetrics {
  double loss = 0;
  double bits_per_base = 0;
  std::int64_t bases = 0;  // scored
};

struct StepMetrics {
  std::int64_t step = 0;
  std::int64_t tokens_seen = 0;
  double loss = 0, aux_loss = 0, grad_norm = 0, lr = 0;
  std::vector<double> layer_aux_loss, z_loss;  // empty: not trained
  double step_ms = 0, tokens_per_s = 0, unpadded_tokens_per_s = 0;
  double flops_per_s = 0;     // of the model's own arithmetic, all ranks; 0: not known
  std::optional<double> mfu;  // part of what its GPUs were measured to do, ≤ 1; none on a CPU
  std::int64_t memory_peak_bytes = 0;  // of the rank that took most
  int redone = 0;  // how often the step was made again, with larger buffers for rows of experts
  std::vector<std::vector<double>> expert_load;  // as ExpertLoad
  std::vector<double> load_entropy;
  std::optional<HeldoutMetrics> heldout;
};

std::string ToJson(const StepMetrics& metrics);
// Throws kBadInput with `where`.
StepMetrics ParseStepMetrics(const std::string& line, const std::string& where);
// Every complete line; a last line that a crash cut short is left out. Empty when there is no file.
std::vector<StepMetrics> ReadMetrics(const std::filesystem::path& file);

// Shares of a layer's assignments and their entropy over ln E.
void SetExpertLoad(const std::vector<std::vector<std::int64_t>>& counts, StepMetrics& metrics);

// Shares of one step, [layer][expert].
using ExpertLoad = std::vector<std::vector<double>>;

// An expert that gets less than this part of an even share hardly learns: 0.5% of a layer's
// assignments where it has 8 experts.
inline constexpr double kIdleShare = 0.04;
// Steps whose mean load counts, from the end of a run.
inline constexpr std::size_t kIdleSteps = 100;

struct IdleExperts {
  std::int64_t idle = 0, all = 0;  // over the layers
  std::int64_t experts = 0;        // a layer
  std::int64_t steps = 0;          // over which the load was taken
};
// Of the last kIdleSteps loads; all is 0 when there is none.
IdleExperts CountIdleExperts(const std::vector<ExpertLoad>& steps);
// "22 of 64 experts are idle: each gets less than 0.5% of its layer's assignments (last 100 steps)"
std::string Describe(const IdleExperts& idle);

// final.json: what a finished run leaves, for people and for the report.
struct RunSummary {
  std::int64_t steps = 0, tokens = 0, parameters = 0, active_parameters = 0;
  double train_seconds = 0;               // in steps, over all resumptions
  std::string weights_checksum;           // training_state.h, in hex
  std::optional<HeldoutMetrics> heldout;  // over the whole held-out part
};
void WriteSummary(const std::filesystem::path& file, const RunSummary& summary);
// Nothing when there is no such file. Throws kBadInput when it is damaged.
std::optional<RunSummary> ReadSummary(const std::filesystem::path& file);

class MetricsWriter {
 public:
  // Continues after `last_step`: later lines, and one cut short, are removed first. 0 starts anew.
  MetricsWriter(const std::filesystem::path& file, std::int64_t last_step);
  ~MetricsWriter();
  // Appends a line and flushes it.
  void Write(const StepMetrics& metrics);
  // Writes the last line anew, with the held-out fields that it lacked; nothing when the last line
  // is of another step.
  void AddHeldout(const StepMetrics& metrics);
  // The last line of the file.
  const std::optional<StepMetrics>& last() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::train
