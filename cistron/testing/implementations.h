// Runs a test with every implementation of an op that supports a problem.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"
#include "cistron/testing/cuda.h"
#include "cistron/testing/instruction_set.h"

namespace cistron::testing {

// Calls f(context) with the context of each implementation of `list` that supports `problem`; fails
// when there is none. Those of a GPU run where there is one, on tensors in page-locked host memory
// (cuda.h), so that a test needs to know nothing of them.
template <class Problem, class Run, class F>
void ForEachImplementation(std::span<const ops::Implementation<Problem, Run>> list,
                           const Problem& problem, F&& f) {
  int run = 0;
  for (const auto& implementation : list) {
    if (!implementation.supports(problem)) continue;
    if (implementation.device == DeviceType::kCuda) {
      if (!HasCuda()) continue;
      SCOPED_TRACE("implementation " + std::string(implementation.name));
      f(CudaContext().WithImpl(implementation.name));
      continue;
    }
    SCOPED_TRACE("implementation " + std::string(implementation.name));
    const ops::Context ctx = ops::Context().WithImpl(implementation.name);
    ++run;
    if (implementation.name == "ref") {
      f(ctx);
      continue;
    }
    for (const std::int64_t target : InstructionSets()) {
      SCOPED_TRACE(InstructionSetName(target));
      const ScopedInstructionSet scope(target);
      f(ctx);
    }
  }
  EXPECT_GT(run, 0) << "no implementation supports the problem";
}

// The context of one implementation, for tests that go through a list by themselves; HasCuda() must
// hold for one of a GPU.
template <class Problem, class Run>
ops::Context ContextOf(const ops::Implementation<Problem, Run>& implementation) {
  return (implementation.device == DeviceType::kCuda ? CudaContext() : ops::Context())
      .WithImpl(implementation.name);
}
// The implementations of `list` that can run here.
template <class Problem, class Run>
std::vector<ops::Implementation<Problem, Run>> RunnableImplementations(
    std::span<const ops::Implementation<Problem, Run>> list) {
  std::vector<ops::Implementation<Problem, Run>> runnable;
  for (const auto& implementation : list) {
    if (implementation.device == DeviceType::kCpu || HasCuda()) runnable.push_back(implementation);
  }
  return runnable;
}

// Sets the number of threads and restores it.
class ThreadsForScope {
 public:
  explicit ThreadsForScope(int threads) : before_(NumThreads()) { SetNumThreads(threads); }
  ~ThreadsForScope() { SetNumThreads(before_); }
  ThreadsForScope(const ThreadsForScope&) = delete;
  ThreadsForScope& operator=(const ThreadsForScope&) = delete;

 private:
  int before_;
};

}  // namespace cistron::testing
