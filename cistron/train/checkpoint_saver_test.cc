// Checkpoints written beside the steps are those of their own step, and failures are not lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "cistron/comm/inproc.h"
#include "cistron/train/checkpoint_saver.h"
#include "cistron/train/tiny_run.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> Checkpoints(const TinyRun& tiny, const std::string& output) {
  return io::ListCheckpoints(RunPaths{tiny.path(output)}.checkpoints());
}

void ExpectSameTensors(const fs::path& a, const fs::path& b) {
  const io::CheckpointReader x(a), y(b);
  ASSERT_EQ(x.names(), y.names());
  for (const std::string& name : x.names()) {
    const Tensor p = x.Read(name), q = y.Read(name);
    ASSERT_EQ(p.bytes(), q.bytes()) << name;
    EXPECT_EQ(std::memcmp(p.raw(), q.raw(), static_cast<std::size_t>(p.bytes())), 0)
        << a << " " << name;
  }
}

// Of runs that saved each of their ten steps.
void ExpectSameCheckpoints(const TinyRun& tiny, const std::string& got,
                           const std::string& expected) {
  const auto a = Checkpoints(tiny, got), b = Checkpoints(tiny, expected);
  ASSERT_EQ(a.size(), 10u);
  ASSERT_EQ(b.size(), 10u);
  for (std::size_t i = 0; i < a.size(); ++i) ExpectSameTensors(a[i], b[i]);
}

TEST(CheckpointSaver, CheckpointsInTheBackgroundHoldTheirOwnStep) {
  TinyRun tiny("background");
  tiny.Train("waited", {"checkpoint.every=1"});
  tiny.Train("beside", {"checkpoint.every=1", "checkpoint.background=true"});
  ExpectSameCheckpoints(tiny, "beside", "waited");
}

TEST(CheckpointSaver, RanksWriteTogetherInTheBackground) {
  TinyRun tiny("background-ranks");
  for (const char* background : {"false", "true"}) {
    tiny.TrainOnRanks(
        background, {"checkpoint.every=1", "parallel.ep=2", "parallel.dp=2", "parallel.shard=full",
                     fmt::format("checkpoint.background={}", background)});
  }
  ExpectSameCheckpoints(tiny, "true", "false");
}

// The copy does not follow the state; a failure is told by the next call.
TEST(CheckpointSaver, CopiesAndTellsOfFailures) {
  TinyRun tiny("saver");
  comm::RunRanks(1, [&](comm::Communicator& ranks) {
    const Tensor t = Tensor::FromSpan<float>({2}, std::array{1.0f, 2.0f});
    TrainingSnapshot snapshot{.step = 3, .boxes = {{"t", t, {2}, {0}}}, .state_json = "{}"};
    const TrainingSnapshot copy = snapshot.Copy();
    t.data<float>()[0] = 7;
    EXPECT_EQ(copy.boxes[0].tensor.data<float>()[0], 1);

    std::ofstream(tiny.path("file")) << "no directory";
    CheckpointSaver bad(tiny.path("file"), 2, ranks);
    bad.SaveLater(copy);
    EXPECT_THROW(bad.Wait(), Error);
    bad.Wait();  // told once

    CheckpointSaver saver(tiny.path("good"), 2, ranks);
    for (std::int64_t step = 1; step <= 4; ++step) {
      snapshot.step = step;
      saver.SaveLater(snapshot.Copy());
    }
    saver.Wait();
    EXPECT_EQ(io::ListCheckpoints(tiny.path("good")).size(), 2u);
  });
}

}  // namespace
}  // namespace cistron::train
