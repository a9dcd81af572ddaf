// A run from its configuration to its final model.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "cistron/comm/communicator.h"
#include "cistron/train/metrics.h"
#include "cistron/train/run_config.h"
#include "cistron/train/run_directory.h"

namespace cistron::train {

struct TrainHooks {
  // Asked after every step and within evaluations: true ends the run with a checkpoint (a signal
  // arrived).
  std::function<bool()> stop_requested;
  // Called after every step, its checkpoint included.
  std::function<void(std::int64_t step)> after_step;
  std::FILE* out = stdout;          // progress and notices
  bool lines_only = false;          // no progress bar: mpirun makes a terminal of any file
  std::string resume_command = {};  // as people would type it, for the notice of a stopped run
  std::string program = {};         // which it is: must be the same on every rank
};

struct TrainOutcome {
  RunPaths paths;
  std::int64_t steps = 0;
  bool finished = false;     // false: stopped on request; the same command continues it
  IdleExperts idle_experts;  // of a finished run
  std::optional<HeldoutMetrics> heldout;  // of a finished run, over the whole held-out part
};

// Trains or resumes. Configuration and data are checked before anything is written. Throws
// kNumericalFailure when loss, gradients or weights are not finite; the last good checkpoint stays.
//
// With `ranks` every one of them calls it, with the same configuration, whose parallel.dp times
// parallel.ep is their number. The first rank alone prints and writes metrics and results; all
// write checkpoints. An error that all ranks share is thrown as parallel::SharedError; one that a
// single rank meets is thrown there, and whoever runs the ranks must end the others. null: one
// rank.
TrainOutcome Train(const LoadedConfig& loaded, const TrainHooks& hooks,
                   comm::Communicator* ranks = nullptr);

// What each rank of a run would do, without its device and without a run written: the
// implementation of each op in its precision at its sizes, the options of its recipe, and how its
// experts are fused. How long sequences are is read from the data where that is there, else
// assumed; the text says which. Throws as Train does where one of them is refused.
std::string ExplainRun(const LoadedConfig& loaded);

}  // namespace cistron::train
