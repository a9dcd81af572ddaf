// The thread that reads ahead: order, depth, what it throws, its end and its destruction.
#include "cistron/data/prefetcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

#include "cistron/base/error.h"
#include "cistron/data/test_files.h"

namespace cistron::data {
namespace {

using std::chrono::milliseconds;

FetchedBatch Numbered(std::int64_t number) {
  FetchedBatch fetched;
  fetched.state_after.step = number;
  return fetched;
}

// Waits until `count` has reached `value`; false when it has not for ten seconds.
bool Reaches(const std::atomic<int>& count, int value) {
  for (int i = 0; i < 10000 && count < value; ++i) std::this_thread::sleep_for(milliseconds(1));
  return count >= value;
}

TEST(Prefetcher, KeepsTheOrder) {
  for (const int depth : {1, 2, 5, 100}) {
    std::int64_t next = 0;
    Prefetcher batches([&next] { return Numbered(next++); }, 50, depth);
    for (std::int64_t i = 0; i < 50; ++i) {
      if (i % 7 == 0) std::this_thread::sleep_for(milliseconds(1));
      ASSERT_EQ(batches.Next().state_after.step, i) << "depth " << depth;
    }
  }
}

TEST(Prefetcher, ReadsNoFurtherThanItsDepth) {
  std::atomic<int> reads{0};
  Prefetcher batches([&reads] { return Numbered(reads++); }, 100, 3);
  ASSERT_TRUE(Reaches(reads, 3));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(reads, 3);
  batches.Next();
  ASSERT_TRUE(Reaches(reads, 4));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(reads, 4);
}

TEST(Prefetcher, EndsAfterItsSteps) {
  std::atomic<int> reads{0};
  Prefetcher batches([&reads] { return Numbered(reads++); }, 2, 4);
  EXPECT_EQ(batches.Next().state_after.step, 0);
  EXPECT_EQ(batches.Next().state_after.step, 1);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(batches.Next(), Error);
  EXPECT_EQ(reads, 2);
  Prefetcher none([&reads] { return Numbered(reads++); }, 0);
  EXPECT_THROW(none.Next(), Error);
  EXPECT_EQ(reads, 2);
}

TEST(Prefetcher, WhatIsThrownReachesTheConsumerAfterTheBatchesBefore) {
  std::int64_t next = 0;
  Prefetcher batches(
      [&next] {
        if (next == 2) throw std::runtime_error("the disk is gone");
        return Numbered(next++);
      },
      100, 8);
  EXPECT_EQ(batches.Next().state_after.step, 0);
  EXPECT_EQ(batches.Next().state_after.step, 1);
  for (int i = 0; i < 2; ++i) {
    try {
      batches.Next();
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "the disk is gone");
    }
  }
}

TEST(Prefetcher, AConsumerThatWaitsGetsTheError) {
  std::promise<void> go;
  Prefetcher batches(
      [ready = go.get_future().share()]() -> FetchedBatch {
        ready.wait();
        throw std::runtime_error("late");
      },
      1);
  std::thread later([&go] {
    std::this_thread::sleep_for(milliseconds(5));
    go.set_value();
  });
  EXPECT_THROW(batches.Next(), std::runtime_error);
  later.join();
}

// The producer waits for room when the consumer leaves, as after a stop signal.
TEST(Prefetcher, DestructionWhileTheProducerWaits) {
  std::atomic<int> reads{0};
  {
    Prefetcher batches([&reads] { return Numbered(reads++); }, 1'000'000, 2);
    ASSERT_TRUE(Reaches(reads, 2));
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(reads, 2);
  // At any moment, before the thread has begun too; and an error that nobody takes is dropped.
  for (int i = 0; i < 50; ++i) {
    const Prefetcher batches([] { return Numbered(0); }, 3, 1);
  }
  const Prefetcher broken([]() -> FetchedBatch { throw std::runtime_error("nobody asks"); }, 3);
}

TEST(Prefetcher, DestructionWaitsForAReadUnderWay) {
  std::atomic<int> reads{0};
  std::promise<void> go;
  std::thread later;
  {
    const Prefetcher batches(
        [&reads, ready = go.get_future().share()] {
          ++reads;
          ready.wait();
          return Numbered(0);
        },
        10);
    ASSERT_TRUE(Reaches(reads, 1));
    later = std::thread([&go] {
      std::this_thread::sleep_for(milliseconds(5));
      go.set_value();
    });
  }
  EXPECT_EQ(reads, 1);
  later.join();
}

TEST(Prefetcher, RefusesADepthOfZero) {
  EXPECT_THROW(Prefetcher([] { return Numbered(0); }, 1, 0), Error);
}

// A stream that is read ahead gives the batches and states of one that is not.
TEST(Prefetcher, ReadsAStreamAsItIs) {
  const TemporaryDirectory scratch;
  std::string text = ">one\n";
  for (int i = 0; i < 400; ++i) text += "ACGT"[(i * i + i / 3) % 4];
  DataConfig config;
  config.train = {{scratch.Write("one.fa", text + "\n")}};
  config.split.kind = SplitRule::Kind::kNone;
  config.seq_len = 16;
  const auto corpus = Corpus::Open(config);
  TrainingStream plain(corpus, 3, 32);
  Prefetcher batches(std::make_unique<TrainingStream>(corpus, 3, 32), 20);
  for (int step = 0; step < 20; ++step) {
    const GlobalBatch expected = plain.Next();
    const FetchedBatch got = batches.Next();
    ASSERT_EQ(got.batch.rows.size(), expected.rows.size());
    for (std::size_t row = 0; row < expected.rows.size(); ++row) {
      EXPECT_THAT(got.batch.rows[row].tokens.span<std::int64_t>(),
                  ::testing::ElementsAreArray(expected.rows[row].tokens.span<std::int64_t>()));
    }
    EXPECT_EQ(got.state_after.step, plain.state().step);
    EXPECT_EQ(got.state_after.window, plain.state().window);
    EXPECT_EQ(got.state_after.offset, plain.state().offset);
  }
}

}  // namespace
}  // namespace cistron::data
