// The configuration of a run: everything that decides what it computes, and where it writes.
//
// Values come, later ones over earlier ones, from the defaults here, a YAML preset, and `key=value`
// overrides. The keys, their types, ranges and help are one table (config_schema.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cistron/data/corpus.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/train/config_faults.h"
#include "cistron/train/precision.h"
#include "cistron/train/schedule.h"

namespace cistron::train {

enum class DeviceChoice { kCpu, kCuda };

// What to do when the output directory holds a run already.
enum class OnExists {
  kAuto,    // resume when the effective configuration matches, else fail and show what differs
  kResume,  // resume; keys that leave the state meaningful may differ
  kFail,
  kNew,  // keep the old run under another name and start anew
};

// Whether a GPU's steps are captured in a CUDA graph where their shapes stay the same.
enum class CudaGraph { kAuto, kOff };
struct RunOptions {
  OnExists on_exists = OnExists::kAuto;
};
struct InitOptions {
  std::filesystem::path from;  // Hugging Face directory or checkpoint: weights only
};
struct BatchOptions {
  std::int64_t global_tokens = 2048;
  std::int64_t micro_tokens = 0;  // of one rank; 0: its part of the batch at once
};
struct TrainOptions {
  std::int64_t steps = 1000;
  CudaGraph cuda_graph = CudaGraph::kAuto;
};
struct EvalOptions {
  std::int64_t every = 200;     // 0: only at the end
  std::int64_t tokens = 65536;  // of the held-out part, evenly spread; 0: all of it
};
// Whether ranks that would hold the same parameters share them out: weights, gradients, masters and
// moments, dense ones over all ranks, experts over those that have the same ones.
enum class Sharding { kNone, kFull };
// Whether token rows travel to experts as they are, or, where experts read nothing else of them, as
// the recipe's codes and scales.
enum class TravellingRows { kExact, kQuantized };
struct ParallelOptions {
  std::int64_t dp = 1;
  std::int64_t ep = 1;
  Sharding shard = Sharding::kNone;
  TravellingRows ep_rows = TravellingRows::kExact;
  std::int64_t timeout = 600;  // seconds that a rank waits for others
  bool ep_by_host = false;     // ep_sync=host
  double ep_buffer_factor = 1.5;
};
// Of AdamW in a bf16 model: kF32 keeps fp32 masters and moments, kBF16 neither.
enum class OptimStates { kF32, kBF16 };
// Of gradients of matrices in a bf16 model; those of vectors, embeddings and the head are fp32.
enum class OptimGradients { kAuto, kF32, kBF16 };
// What that comes to: kAuto is bf16 where states are and no layout of ranks cuts a step into
// micro-batches (RunConfig::WholeBatch), else fp32: one layout must not train other numbers than
// another. bf16 is that with several micro-batches too: each adds its part and rounds the sum,
// which is then off by up to 2^-9 of what it was at each of them.
DType GradientDType(Precision precision, OptimStates states, OptimGradients gradients,
                    bool whole_batch);
// Of people: "gradients of matrices in bf16, rounded at every micro-batch"; empty where fp32.
std::string GradientText(DType gradients, bool one_micro_batch);
struct OptimOptions {
  OptimStates states = OptimStates::kF32;
  OptimGradients gradients = OptimGradients::kAuto;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  bool decay_embeddings = false;
  bool decay_all = false;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_end = 0;  // 0: the last step
  double floor_ratio = 0.0;
  double clip = 1.0;  // 0: no clipping
};
struct CheckpointOptions {
  std::int64_t every = 500;  // 0: only at the end
  std::int64_t keep = 2;
  bool background = false;  // written from a copy, beside the next steps
  bool at_end = true;       // after the last step; false: the run leaves no model
};
// Steps whose time is told op by op; 0: none.
struct ProfileOptions {
  std::int64_t first = 0, last = 0;

  bool Contains(std::int64_t step) const { return step >= first && step <= last && first > 0; }
};
struct LogOptions {
  std::int64_t every = 20;  // steps between lines when not on a terminal
};

struct RunConfig {
  Device ComputeDevice() const {
    return {device == DeviceChoice::kCuda ? DeviceType::kCuda : DeviceType::kCpu, 0};
  }

  DeviceChoice device = DeviceChoice::kCpu;
  Precision precision = Precision::kFp32;
  RecipeOptions recipe;
  std::filesystem::path output;
  std::uint64_t seed = 1;
  std::int64_t threads = 0;  // 0: all that the machine grants
  bool strict = false;       // ops::Context::strict
  model::Recompute recompute = model::Recompute::kNone;
  RunOptions run;
  InitOptions init;
  model::MixtralConfig model;
  data::DataConfig data;
  std::vector<double> data_weights;  // mixing weights, one a training file; empty: all 1
  BatchOptions batch;
  TrainOptions train;
  OptimOptions optim;
  EvalOptions eval;
  CheckpointOptions checkpoint;
  ParallelOptions parallel;
  LogOptions log;
  ProfileOptions profile;

  bool HasMasters() const { return optim.states == OptimStates::kF32; }
  std::int64_t RowsPerStep() const { return batch.global_tokens / data.seq_len; }
  std::int64_t Ranks() const { return parallel.dp * parallel.ep; }
  // Of one rank.
  std::int64_t RowsPerMicroBatch() const {
    const std::int64_t rows = RowsPerStep() / Ranks();
    return batch.micro_tokens > 0 ? batch.micro_tokens / data.seq_len : rows;
  }
  // Why hosts count the rows that travel to experts of other ranks, for people (ep_sync); empty
  // where GPUs that reach each other's memory do without.
  std::string WhyRowsByHost() const;
  bool OneMicroBatch() const { return RowsPerMicroBatch() * Ranks() >= RowsPerStep(); }
  // Under every layout.
  bool WholeBatch() const {
    return batch.micro_tokens == 0 || batch.micro_tokens >= batch.global_tokens;
  }
  DType GradientDType() const {
    return train::GradientDType(precision, optim.states, optim.gradients, WholeBatch());
  }
  // Of one batch of an evaluation.
  std::int64_t EvaluationTokens() const {
    return std::max(RowsPerMicroBatch() * data.seq_len, std::int64_t{2048});
  }
  Schedule MakeSchedule() const {
    return {optim.lr, optim.warmup_steps, optim.decay_end > 0 ? optim.decay_end : train.steps,
            optim.floor_ratio};
  }
};

// Where a value was written: for errors. Line 0: a command line.
struct ConfigOrigin {
  std::string file;
  int line = 0;
};
std::string ToString(
    const ConfigOrigin& origin);  // "configs/L0_sanity.yaml:12", "the command line"

// A configuration and where each key that was set came from.
struct LoadedConfig {
  RunConfig config;
  std::map<std::string, ConfigOrigin> origins;
  // What ResolveInit has found, told by all checks.
  ConfigFaults faults = {};
  // Files of data that ResolveDataPaths has not found, told by CheckRunConfig.
  ConfigFaults data_faults = {};
  bool model_known = true;  // false: it is that of init.from, which cannot be read

  bool HasData() const { return !config.data.train.empty() && data_faults.size() == 0; }
  // "model.hidden_size (configs/x.yaml:3)", or the key alone when it has its default.
  std::string Where(const std::string& key) const;
};

// Reads a preset (may be empty: defaults alone) and applies overrides `key=value`. Checks each
// value's type and range, not yet how they fit together. Throws kBadInput with key, value, file and
// line, of all keys that are wrong.
LoadedConfig LoadRunConfig(const std::filesystem::path& yaml_file,
                           const std::vector<std::string>& overrides);
// The same from the text of a preset, `name` standing for the file in errors.
LoadedConfig ParseRunConfig(const std::string& yaml, const std::string& name,
                            const std::vector<std::string>& overrides);

// Finds a preset: a path to a YAML file, or a name sought in $CISTRON_CONFIG_PATH
// (colon-separated), the configs/ of the working directory, of the source tree and of the
// installation. Throws kNotFound with the presets that there are.
std::filesystem::path FindPreset(const std::string& name);
std::vector<std::filesystem::path> PresetFolders();

// Relative data files that do not exist from the working directory are sought beside the preset and
// one folder above it, so that a preset's own files are found from anywhere. Makes them absolute.
// Adds to loaded.data_faults, kNotFound with the places tried, each that is nowhere; init.from may
// be missing, since a run that is resumed does not need it.
void ResolveDataPaths(LoadedConfig& loaded, const std::filesystem::path& preset);

// With init.from, the model's architecture is that of its weights: it replaces the preset's. Adds
// to loaded.faults where it cannot be read, and each key of it given on the command line with
// another value. (Here: init_from.cc.)
void ResolveInit(LoadedConfig& loaded);

// The configuration of a command: a preset's by name (may be empty) under overrides, its data and
// the model of init.from resolved.
LoadedConfig LoadRun(const std::string& preset, const std::vector<std::string>& overrides);

// Checks that the values fit together and are done by this version, before anything is read or
// written. Throws kBadInput, kNotFound or kUnsupported naming the keys and what to change, of
// the faults in `loaded` and all others that do not follow from each other.
void CheckRunConfig(const LoadedConfig& loaded);
// The part that needs neither data nor device: of a run that is only planned.
void CheckStep(const LoadedConfig& loaded);
// That part, and keys of the data where that is there: of a run that is explained.
void CheckExplained(const LoadedConfig& loaded);

// What a run reads, data.weights with their files.
data::DataConfig DataOf(const RunConfig& config);

// The effective configuration as YAML, every key, in the order of the schema.
std::string ToYaml(const RunConfig& config);

}  // namespace cistron::train
