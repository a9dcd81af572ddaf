// Threads: OpenMP underneath, one place that decides how many.
//
// Work is always cut into chunks that depend on the problem and the thread count alone, so that the
// same machine and thread count give the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

namespace cistron {

// Processors this process may use: affinity mask, capped by the cgroup's CPU quota (rounded up).
int AvailableCpus();
// The same for the process that started this one.
int AvailableCpusOfParent();

// Threads that parallel loops use now: OMP_NUM_THREADS or AvailableCpus(), or what was set.
int NumThreads();
// Sets the number of threads (≥ 1) for this process.
void SetNumThreads(int threads);

namespace internal {
using ChunkFunction = void (*)(void* state, std::int64_t begin, std::int64_t end, int thread);
void RunChunks(std::int64_t n, std::int64_t grain, ChunkFunction function, void* state);
}  // namespace internal

// Calls f(begin, end, thread) on contiguous chunks of about equal size that cover [0, n), one chunk
// a thread, on at most ceil(n / grain) threads; runs in the calling thread when n ≤ grain, when one
// thread is set, or inside another parallel loop. The first exception thrown by f is rethrown in
// the caller.
template <class F>
void ParallelChunks(std::int64_t n, std::int64_t grain, F&& f) {
  using Fn = std::remove_reference_t<F>;
  internal::RunChunks(
      n, grain,
      [](void* state, std::int64_t begin, std::int64_t end, int thread) {
        (*static_cast<Fn*>(state))(begin, end, thread);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Calls f(i) for every i in [0, n), on at most ceil(n / grain) threads.
template <class F>
void ParallelFor(std::int64_t n, std::int64_t grain, F&& f) {
  ParallelChunks(n, grain, [&f](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
  });
}

// Calls f(i) for every i in [0, n), handed out one at a time to whichever thread is free: for items
// of uneven cost. Results must not depend on which thread runs an item.
template <class F>
void ParallelDynamic(std::int64_t n, F&& f);

namespace internal {
using ItemFunction = void (*)(void* state, std::int64_t index);
void RunDynamic(std::int64_t n, ItemFunction function, void* state);
}  // namespace internal

template <class F>
void ParallelDynamic(std::int64_t n, F&& f) {
  using Fn = std::remove_reference_t<F>;
  internal::RunDynamic(
      n, [](void* state, std::int64_t index) { (*static_cast<Fn*>(state))(index); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace cistron
