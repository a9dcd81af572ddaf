// Everything that a run must remember, in one checkpoint: weights, masters, moments, biases of
// routers, state of delayed scaling, the number of updates, the data position, the size of buffers
// that rows of experts have needed, and the configuration that gives them meaning.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/comm/communicator.h"
#include "cistron/data/stream.h"
#include "cistron/io/checkpoint.h"
#include "cistron/model/hugging_face.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/train/run_config.h"
#include "cistron/train/training_step.h"

namespace cistron::train {

// Before the keys of the state of delayed scaling in a checkpoint: a tensor's state begins to exist
// in the tensor's first step, so a checkpoint may have none of them.
inline constexpr std::string_view kScalingPrefix = "quant/";

// Where the data stands, and which data it is.
struct DataPosition {
  data::StreamState stream;
  std::uint64_t fingerprint = 0;  // of the corpus
};

// What this rank has of a checkpoint.
struct TrainingSnapshot {
  std::int64_t step = 0;
  std::vector<io::CheckpointBox> boxes;
  std::string state_json;

  // The same values in host memory of their own, which stay when training goes on.
  TrainingSnapshot Copy() const;
};
// The state as it is; its boxes share memory with it.
TrainingSnapshot TakeSnapshot(const model::LocalMixtral& m, const optim::AdamWOptimizer& optimizer,
                              const quant::ScalingStates& scaling, const DataPosition& data,
                              const RunConfig& config);
// Saves as root/step-NNNNNNNN and returns its path; throws kIo, leaving nothing half-written. All
// ranks call it and each writes what it holds, into one checkpoint, which any layout of ranks
// restores.
std::filesystem::path WriteSnapshot(const std::filesystem::path& root,
                                    const TrainingSnapshot& snapshot, comm::Communicator& ranks);

// Of the weights in the model's type, of all ranks, which call it together: the same for two runs
// of one layout exactly where every bit is. Layouts cut weights otherwise, and have other
// checksums.
std::uint64_t WeightsChecksum(const optim::AdamWOptimizer& optimizer, comm::Communicator& ranks);

// Restores weights, masters, moments, scaling states and the step, this rank's part of each;
// returns the data position. Does not communicate. Throws kBadInput when the checkpoint is of
// another model or lacks a tensor.
DataPosition RestoreTrainingState(const std::filesystem::path& checkpoint, model::LocalMixtral& m,
                                  optim::AdamWOptimizer& optimizer, quant::ScalingStates& scaling);

// The key of an nn::LocalParameterStore::Buffer in a checkpoint.
std::string BufferKey(const std::string& name);

// The model of a checkpoint. `dtype`, optional: its weights' type, "float32" or "bfloat16".
model::MixtralConfig CheckpointModelConfig(const io::CheckpointReader& reader,
                                           const std::filesystem::path& path,
                                           std::string* dtype = nullptr);

// The configuration of the run that saved a checkpoint; nothing for one of weights alone.
std::optional<RunConfig> CheckpointRunConfig(const io::CheckpointReader& reader,
                                             const std::filesystem::path& path);

// A checkpoint of weights alone, at step 0: what a Hugging Face directory becomes by `convert`.
std::filesystem::path SaveWeights(const std::filesystem::path& root,
                                  const model::HuggingFaceModel& model);

}  // namespace cistron::train
