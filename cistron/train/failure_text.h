// What a run says when a step fails for a reason that no check of ours foresaw.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace cistron::train {

struct StepFailure {
  std::int64_t step = 0;
  std::string message;    // of the error
  std::string last_op;    // the newest one that the host started: "attention (cudnn)"
  bool on_gpu = false;    // whose failures come to light at a later call
  bool replayed = false;  // steps are replays of a CUDA graph, in which the host starts no op
  std::optional<std::filesystem::path> checkpoint;  // the newest good one
};

// Names the step, the op as far as it can be known and how to learn more, and the last good
// checkpoint.
std::string Explain(const StepFailure& failure);

}  // namespace cistron::train
