// A run that is stopped, killed or starved of disk space, then started again, computes what an
// undisturbed one does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cistron/base/philox.h"
#include "cistron/train/tiny_run.h"
#include "tests/same_run.h"
#include "tests/subprocess.h"

namespace cistron {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

class KillTest : public ::testing::Test {
 protected:
  std::vector<std::string> Command(const std::string& run, std::vector<std::string> more = {}) {
    more.insert(more.begin(),
                {"checkpoint.every=1", "checkpoint.keep=2", "train.steps=30", "eval.every=10"});
    std::vector<std::string> arguments = tiny_.Overrides(run, more);
    arguments.insert(arguments.begin(), {CISTRON_PROGRAM, "train"});
    return arguments;
  }
  // Runs to the end; returns the seconds that took.
  double Undisturbed(const std::string& run) {
    const auto begin = Clock::now();
    testing::Process process(tiny_.path("."), Command(run));
    EXPECT_EQ(process.Wait(), 0) << process.Errors();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }
  void ExpectSameRun(const std::string& got, const std::string& expected) {
    testing::ExpectSameRun(tiny_, got, expected);
  }
  // Waits until the run has logged a step.
  void AwaitStep(const std::string& run, std::int64_t step) {
    for (int i = 0; i < 2000; ++i) {
      const auto metrics = tiny_.Metrics(run);
      if (!metrics.empty() && metrics.back().step >= step) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    FAIL() << "the run made no step";
  }

  train::TinyRun tiny_{"kill"};
};

TEST_F(KillTest, KilledAtRandomMomentsAndResumed) {
  const double seconds = Undisturbed("whole");
  const RandomStream random(20240611, "kill_test");
  int killed = 0;
  // Later kills come later in the process's life, so that the run gets on whatever the machine.
  for (std::uint64_t i = 0; i < 25; ++i) {
    testing::Process process(tiny_.path("."), Command("killed"));
    std::this_thread::sleep_for(
        std::chrono::duration<double>(seconds * static_cast<double>(random.Uniform(i))));
    if (!process.Running()) break;
    process.Signal(SIGKILL);
    process.Wait();
    ++killed;
  }
  RecordProperty("killed", killed);
  EXPECT_GE(killed, 1);
  Undisturbed("killed");
  ExpectSameRun("killed", "whole");
}

TEST_F(KillTest, TerminateAndInterruptSaveAndExitZero) {
  Undisturbed("whole");
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string run = fmt::format("signal{}", signal);
    // Enough steps that the signal comes before the end; then the run of the others goes on.
    testing::Process process(tiny_.path("."),
                             Command(run, {"checkpoint.every=0", "run.on_exists=new"}));
    AwaitStep(run, 1);
    process.Signal(signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    process.Signal(signal);  // as `timeout` does: still one request
    EXPECT_EQ(process.Wait(), 0) << process.Errors();
    const auto stopped = tiny_.Metrics(run);
    EXPECT_EQ(tiny_.Newest(run).step(), stopped.back().step);
    std::vector<std::string> resume = Command(run);
    if (stopped.size() < 30) {
      const std::string output = process.Output(), mark = "To continue: ";
      EXPECT_THAT(output, AllOf(HasSubstr("as asked"), HasSubstr(mark)));
      // The command that is shown, in a shell; run.on_exists=new would start anew.
      const std::size_t at = output.find(mark) + mark.size();
      resume = {"/bin/sh", "-c", output.substr(at, output.find('\n', at) - at)};
      EXPECT_THAT(resume[2], Not(HasSubstr("run.on_exists=new")));
    }
    testing::Process resumed(tiny_.path("."), resume);
    EXPECT_EQ(resumed.Wait(), 0) << resumed.Errors();
    ExpectSameRun(run, "whole");
  }
}

TEST_F(KillTest, FullDiskKeepsTheLastCheckpoint) {
  Undisturbed("whole");
  {
    testing::Process process(tiny_.path("."), Command("full"));
    AwaitStep("full", 3);
    process.Signal(SIGTERM);
    ASSERT_EQ(process.Wait(), 0);
  }
  const std::int64_t before = tiny_.Newest("full").step();
  {
    // A checkpoint of this model has more bytes than this.
    testing::Process process(tiny_.path("."), Command("full"), {.file_size_limit = 60'000});
    EXPECT_EQ(process.Wait(), before < 30 ? 3 : 0);
    EXPECT_THAT(process.Errors(), HasSubstr("error: "));
  }
  EXPECT_EQ(tiny_.Newest("full").step(), before);
  Undisturbed("full");
  ExpectSameRun("full", "whole");
}

TEST_F(KillTest, TwoProcessesDoNotShareARun) {
  testing::Process first(tiny_.path("."), Command("shared", {"train.steps=100000"}));
  AwaitStep("shared", 1);
  std::filesystem::create_directories(tiny_.path("second"));
  testing::Process second(tiny_.path("second"), Command("shared", {"train.steps=100000"}));
  EXPECT_EQ(second.Wait(), 2);
  EXPECT_THAT(second.Errors(), HasSubstr("another process"));
  first.Signal(SIGTERM);
  EXPECT_EQ(first.Wait(), 0);
}

}  // namespace
}  // namespace cistron
