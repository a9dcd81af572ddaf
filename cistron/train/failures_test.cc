// What a run says when memory or the device gives up in the middle of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "cistron/base/error.h"
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

}  // namespace
}  // namespace cistron::train
