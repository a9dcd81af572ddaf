#include "cistron/train/failure_text.h"

#include <fmt/format.h>

namespace cistron::train {
namespace {

std::string WhichOp(const StepFailure& f) {
  if (f.replayed) {
    return "the step is a replay of a CUDA graph, which does not say in which of its ops it "
           "failed; "
           "with train.cuda_graph=off and CUDA_LAUNCH_BLOCKING=1 in the environment the op is "
           "named";
  }
  const std::string last = "the last op that was started is " + f.last_op;
  if (!f.on_gpu) return last;
  return last + " (with CUDA_LAUNCH_BLOCKING=1 in the environment it is the one that failed)";
}

}  // namespace

std::string Explain(const StepFailure& f) {
  return fmt::format("step {}: {}\n{}\n{}", f.step, f.message, WhichOp(f),
                     f.checkpoint
                         ? fmt::format("the last good checkpoint is {}; the same command continues "
                                       "there",
                                       f.checkpoint->string())
                         : "there is no checkpoint yet");
}

}  // namespace cistron::train
