#include "cistron/train/checkpoint_saver.h"

#include <utility>

#include "cistron/base/log.h"
#include "cistron/io/checkpoint.h"
#include "cistron/parallel/agreement.h"

namespace cistron::train {

CheckpointSaver::CheckpointSaver(std::filesystem::path root, std::int64_t keep,
                                 comm::Communicator& ranks)
    : root_(std::move(root)), keep_(keep), ranks_(ranks.Split(0, ranks.rank(), "checkpoints")) {}

CheckpointSaver::~CheckpointSaver() {
  try {
    Wait();
  } catch (const std::exception& e) {
    LogWarning("the last checkpoint was not written: {}", e.what());
  }
}

void CheckpointSaver::Write(const TrainingSnapshot& snapshot) {
  WriteSnapshot(root_, snapshot, *ranks_);
  parallel::FromFirst(*ranks_, [&] {
    io::PruneCheckpoints(root_, keep_);
    return std::string();
  });
}

void CheckpointSaver::Save(const TrainingSnapshot& snapshot) {
  Wait();
  Write(snapshot);
}

void CheckpointSaver::SaveLater(TrainingSnapshot snapshot) {
  Wait();
  writing_ =
      std::async(std::launch::async, [this, snapshot = std::move(snapshot)] { Write(snapshot); });
}

void CheckpointSaver::Wait() {
  if (writing_.valid()) writing_.get();
}

}  // namespace cistron::train
