// What a run says when memory or the device gives up in the middle of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "cistron/base/error.h"
#include "cistron/train/failure_text.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Error FailureOf(const LoadedConfig& loaded, const TrainHooks& hooks) {
  try {
    Train(loaded, hooks);
  } catch (const Error& e) {
    return e;
  }
  return {ErrorCode::kInternal, "nothing failed"};
}

// Blocks of 2 MiB and more, of which the machine has five.
int large_blocks = 0;
void* AllocateFew(std::size_t alignment, std::size_t bytes) {
  if (bytes >= (2 << 20) && ++large_blocks > 5) return nullptr;
  return std::aligned_alloc(alignment, bytes);
}

TEST(Failures, OutOfMemoryNamesTheLargestAndTheKey) {
  TinyRun tiny("memory");
  TrainHooks hooks;
  hooks.out = std::tmpfile();
  SetHostMemory({AllocateFew, std::free});
  const Error e = FailureOf(
      tiny.Load("run", {"data.seq_len=512", "batch.global_tokens=4096",
                        "model.intermediate_size=256", "model.max_position_embeddings=512"}),
      hooks);
  SetHostMemory({std::aligned_alloc, std::free});
  EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
  EXPECT_THAT(e.message(), AllOf(HasSubstr("memory: the system refused"),
                                 HasSubstr("most of it experts: pre-activations"),
                                 HasSubstr("recompute=moe would need")));
}

// A hook stands for a kernel that failed: the device reports it at a later call.
TEST(Failures, OfADeviceNameOpStepAndCheckpoint) {
  TinyRun tiny("device");
  TrainHooks hooks;
  hooks.out = std::tmpfile();
  std::int64_t fails_at = 2;
  hooks.after_step = [&](std::int64_t step) {
    if (step == fails_at) {
      throw Error(ErrorCode::kInternal, "cuda: an illegal memory access was encountered");
    }
  };
  const Error before = FailureOf(tiny.Load("run"), hooks);
  EXPECT_THAT(before.message(), AllOf(HasSubstr("step 2: cuda: an illegal memory access"),
                                      HasSubstr("the last op that was started is adamw ("),
                                      HasSubstr("there is no checkpoint yet")));
  fails_at = 5;
  const Error after = FailureOf(tiny.Load("run"), hooks);
  EXPECT_THAT(after.message(), AllOf(HasSubstr("step 5: "), HasSubstr("step-00000003; the same")));
}

TEST(Failures, OfAGpuSayHowTheOpIsFound) {
  const StepFailure eager{.step = 7,
                          .message = "cuda: an illegal memory access was encountered",
                          .last_op = "attention (cudnn)",
                          .on_gpu = true,
                          .checkpoint = "runs/a/checkpoints/step-00000006"};
  EXPECT_EQ(Explain(eager),
            "step 7: cuda: an illegal memory access was encountered\n"
            "the last op that was started is attention (cudnn) (with CUDA_LAUNCH_BLOCKING=1 in the "
            "environment it is the one that failed)\n"
            "the last good checkpoint is runs/a/checkpoints/step-00000006; the same command "
            "continues there");
  // The host starts no op of a replay: the last that it did start, of the capture, has no part.
  StepFailure replayed = eager;
  replayed.replayed = true;
  EXPECT_EQ(Explain(replayed).find("attention"), std::string::npos);
  EXPECT_THAT(Explain(replayed), AllOf(HasSubstr("step 7: cuda: an illegal memory access"),
                                       HasSubstr("the step is a replay of a CUDA graph"),
                                       HasSubstr("train.cuda_graph=off and CUDA_LAUNCH_BLOCKING=1"),
                                       HasSubstr("step-00000006; the same command")));
}

}  // namespace
}  // namespace cistron::train
