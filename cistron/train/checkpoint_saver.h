// Checkpoints of a run, written beside its steps.
#pragma once

#include <filesystem>
#include <future>
#include <memory>

#include "cistron/comm/communicator.h"
#include "cistron/train/training_state.h"

namespace cistron::train {

// Writes snapshots as checkpoints under `root` and prunes old ones; one at a time. On every rank of
// `ranks`, in a communicator of its own, so that what ranks exchange in their steps does not meet
// what they exchange about files.
class CheckpointSaver {
 public:
  // Collective.
  CheckpointSaver(std::filesystem::path root, std::int64_t keep, comm::Communicator& ranks);
  // Waits; what fails then is logged.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Writes the snapshot, whose tensors must not change meanwhile, and returns when it is on disk.
  // Throws as WriteSnapshot does.
  void Save(const TrainingSnapshot& snapshot);
  // Starts to write and returns; waits for the one before. A failure is thrown by the next call.
  void SaveLater(TrainingSnapshot snapshot);
  // Until everything is on disk.
  void Wait();

 private:
  void Write(const TrainingSnapshot& snapshot);

  std::filesystem::path root_;
  std::int64_t keep_;
  std::unique_ptr<comm::Communicator> ranks_;
  std::future<void> writing_;
};

}  // namespace cistron::train
