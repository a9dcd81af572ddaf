#include "cistron/base/threads.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "cistron/base/error.h"

namespace cistron {
namespace {

// Every test runs with four threads, whatever the machine has, and puts the number back.
class Threads : public ::testing::Test {
 protected:
  void SetUp() override { SetNumThreads(4); }
  void TearDown() override { SetNumThreads(before_); }
  const int before_ = NumThreads();
};

using Chunk = std::tuple<std::int64_t, std::int64_t, int>;

std::set<Chunk> ChunksOf(std::int64_t n, std::int64_t grain) {
  std::set<Chunk> chunks;
  std::mutex mutex;
  ParallelChunks(n, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
    std::lock_guard lock(mutex);
    chunks.insert({begin, end, thread});
  });
  return chunks;
}

TEST_F(Threads, EveryIndexOnce) {
  for (const std::int64_t n : {0, 1, 3, 4, 5, 100, 1001}) {
    std::vector<std::atomic<int>> static_calls(static_cast<std::size_t>(n));
    std::vector<std::atomic<int>> dynamic_calls(static_cast<std::size_t>(n));
    ParallelFor(n, 1, [&](std::int64_t i) { ++static_calls[static_cast<std::size_t>(i)]; });
    ParallelDynamic(n, [&](std::int64_t i) { ++dynamic_calls[static_cast<std::size_t>(i)]; });
    for (const auto& calls : static_calls) EXPECT_EQ(calls, 1) << n;
    for (const auto& calls : dynamic_calls) EXPECT_EQ(calls, 1) << n;
  }
}

TEST_F(Threads, ChunksAreAFunctionOfSizeAndThreads) {
  const std::set<Chunk> first = ChunksOf(1003, 10);
  EXPECT_EQ(first.size(), 4u);
  for (int repeat = 0; repeat < 50; ++repeat) EXPECT_EQ(ChunksOf(1003, 10), first);
  SetNumThreads(3);
  EXPECT_EQ(ChunksOf(9, 1), (std::set<Chunk>{{0, 3, 0}, {3, 6, 1}, {6, 9, 2}}));
}

TEST_F(Threads, SmallWorkStaysInTheCallingThread) {
  EXPECT_EQ(ChunksOf(10, 10), (std::set<Chunk>{{0, 10, 0}}));
  EXPECT_EQ(ChunksOf(11, 10).size(), 2u);
  std::thread::id ran;
  ParallelFor(1, 1, [&](std::int64_t) { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_EQ(ChunksOf(8, 0).size(), 4u);  // a grain below one counts as one
}

TEST_F(Threads, OneThreadRunsEverythingHere) {
  SetNumThreads(1);
  EXPECT_EQ(ChunksOf(1000, 1), (std::set<Chunk>{{0, 1000, 0}}));
}

TEST_F(Threads, AnExceptionReachesTheCaller) {
  const auto fail = [](std::int64_t i) { CISTRON_CHECK(i != 77, "item {} is bad", i); };
  for (const auto& run : {+[](const decltype(fail)& f) { ParallelFor(100, 1, f); },
                          +[](const decltype(fail)& f) { ParallelDynamic(100, f); }}) {
    try {
      run(fail);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.message(), "item 77 is bad");
    }
  }
  // Every thread throws: one exception arrives, and the next loop works.
  EXPECT_THROW(ParallelFor(4, 1, [](std::int64_t) { throw std::runtime_error("all"); }),
               std::runtime_error);
  EXPECT_EQ(ChunksOf(1003, 10).size(), 4u);
}

TEST_F(Threads, ANestedLoopRunsInItsThread) {
  std::atomic<int> calls{0};
  std::atomic<int> elsewhere{0};
  ParallelFor(4, 1, [&](std::int64_t) {
    const std::thread::id outer = std::this_thread::get_id();
    ParallelFor(100, 1, [&](std::int64_t) {
      ++calls;
      if (std::this_thread::get_id() != outer) ++elsewhere;
    });
    ParallelDynamic(10, [&](std::int64_t) { ++calls; });
  });
  EXPECT_EQ(calls, 440);
  EXPECT_EQ(elsewhere, 0);
}

TEST_F(Threads, ANestedExceptionReachesTheCaller) {
  EXPECT_THROW(ParallelFor(4, 1,
                           [](std::int64_t i) {
                             ParallelFor(
                                 4, 1, [i](std::int64_t j) { CISTRON_CHECK(i + j != 6, "inner"); });
                           }),
               Error);
}

TEST_F(Threads, LoopsOfSeveralCallersDoNotMix) {
  std::array<std::int64_t, 3> sums{};
  std::vector<std::thread> callers;
  for (std::size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&sums, c] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        std::atomic<std::int64_t> sum{0};
        ParallelFor(100, 1, [&](std::int64_t i) { sum += i; });
        sums[c] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 20 * 4950);
}

TEST_F(Threads, CountsArePositive) {
  EXPECT_GE(AvailableCpus(), 1);
  EXPECT_EQ(NumThreads(), 4);
  EXPECT_THROW(SetNumThreads(0), Error);
  EXPECT_EQ(NumThreads(), 4);
}

}  // namespace
}  // namespace cistron
