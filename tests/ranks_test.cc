// Ranks as processes: under mpirun and `cistron launch` they train what threads train; they stop,
// fail and are refused together, with one message and no process left.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

#include "cistron/base/threads.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/io/file.h"
#include "tests/same_run.h"
#include "tests/subprocess.h"

namespace cistron {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Strings = std::vector<std::string>;

constexpr int kSteps = 60;
constexpr const char* kDecayEnd = "optim.decay_end=60";
// For a machine that does other things, too.
constexpr std::chrono::seconds kSlack{30};

Strings operator+(Strings a, const Strings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::size_t Count(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

class RanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Tests run as root in containers.
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    // The library of MPI leaks a little at its end.
    setenv("ASAN_OPTIONS", "detect_leaks=0:allocator_may_return_null=1", 1);
  }

  // Of `cistron`.
  Strings TrainWords(const std::string& run, const Strings& more = {}) const {
    return Strings{"train"} +
           tiny_.Overrides(run, Strings{fmt::format("train.steps={}", kSteps), "eval.every=20",
                                        "checkpoint.every=0", "parallel.ep=2", "threads=1"} +
                                    more);
  }
  static Strings Mpirun(int ranks, const Strings& words, const Strings& options = {}) {
    return Strings{CISTRON_MPIRUN, "--oversubscribe", "--bind-to", "none"} + options +
           Strings{"-np", std::to_string(ranks), CISTRON_PROGRAM} + words;
  }
  static Strings Launch(int ranks, const Strings& words, const Strings& options = {}) {
    return Strings{CISTRON_PROGRAM, "launch", "-n", std::to_string(ranks)} + options + words;
  }

  struct Result {
    int status;
    std::string out, err;
  };
  Result Run(const Strings& command) {
    testing::Process process(tiny_.path("."), command);
    const int status = process.Wait();
    return {status, process.Output(), process.Errors()};
  }
  // A run of two threads of one process, as long as those of the test.
  void TrainOnThreads(const std::string& run, const Strings& more = {}) {
    // Threads of one process share what `threads` says.
    const Result r = Run(Strings{CISTRON_PROGRAM} + TrainWords(run, Strings{"threads=2"} + more));
    ASSERT_EQ(r.status, 0) << r.err;
  }
  // Of a run that a test interrupts wherever it is: more steps than are made by then, at rates that
  // do not depend on their number.
  static Strings Endless(const Strings& more = {}) {
    return Strings{"train.steps=1000000", kDecayEnd} + more;
  }
  // Some steps more than the run has saved, by `command`, or by mpirun; all of them must be those
  // of a run that nothing interrupted.
  void FinishAndCompare(const std::string& run, const Strings& more = {},
                        const std::string& command = {}) {
    const fs::path checkpoints = train::RunPaths{tiny_.path(run)}.checkpoints();
    const bool saved = io::NewestGoodCheckpoint(checkpoints).has_value();
    const std::string end =
        fmt::format("train.steps={}", (saved ? tiny_.Newest(run).step() : 0) + 4);
    const std::string whole = "whole-" + run;
    TrainOnThreads(whole, more + Strings{end, kDecayEnd});
    const Strings keys = {end, kDecayEnd, "run.on_exists=resume"};
    const Result r =
        command.empty()
            ? Run(Mpirun(2, TrainWords(run, more + keys)))
            : Run({"/bin/sh", "-c", fmt::format("{} {}", command, fmt::join(keys, " "))});
    ASSERT_EQ(r.status, 0) << r.err;
    EXPECT_THAT(r.out, HasSubstr("held-out: "));
    testing::ExpectSameRun(tiny_, run, whole);
    EXPECT_FALSE(HasTemporaries(run)) << "left in " << run;
  }

  // One step more of a copy of the run.
  void ExpectOtherLayoutResumes(const std::string& run) {
    const std::string moved = run + "-moved";
    fs::copy(tiny_.path(run), tiny_.path(moved), fs::copy_options::recursive);
    const std::int64_t end = tiny_.Newest(moved).step() + 1;
    const Result r = Run(Strings{CISTRON_PROGRAM} +
                         TrainWords(moved, {fmt::format("train.steps={}", end), kDecayEnd,
                                            "threads=2", "run.on_exists=resume", "parallel.dp=4",
                                            "parallel.ep=1", "parallel.shard=full"}));
    EXPECT_EQ(r.status, 0) << r.err;
    EXPECT_EQ(tiny_.Newest(moved).step(), end);
    EXPECT_EQ(tiny_.Metrics(moved).size(), static_cast<std::size_t>(end));
    EXPECT_FALSE(HasTemporaries(moved)) << "left in " << moved;
  }

  // Process ids of the ranks of a run, by rank, from what Linux says of every process.
  std::map<int, pid_t> Pids(const std::string& run) const {
    const std::string output = "output=" + tiny_.path(run).string();
    const std::string variable = "OMPI_COMM_WORLD_RANK=";
    std::map<int, pid_t> pids;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      pid_t pid = 0;
      if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc()) continue;
      const auto words = ReadWords(entry.path() / "cmdline"),
                 environment = ReadWords(entry.path() / "environ");
      if (!words.contains(output)) continue;
      for (const std::string& v : environment) {
        if (v.starts_with(variable)) pids[std::stoi(v.substr(variable.size()))] = pid;
      }
    }
    return pids;
  }
  static std::set<std::string> ReadWords(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    std::set<std::string> words;
    for (std::string word; std::getline(in, word, '\0');) words.insert(word);
    return words;
  }
  // mpirun goes a little before the processes that it ends.
  void ExpectNoRankLeft(const std::string& run) const {
    for (int i = 0; i < 400; ++i) {
      if (Pids(run).empty()) return;
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_THAT(Pids(run), ::testing::IsEmpty()) << "processes still run";
  }
  // Waits until the run has logged a step.
  void AwaitStep(const std::string& run, std::int64_t step) const {
    for (int i = 0; i < 6000; ++i) {
      const auto metrics = tiny_.Metrics(run);
      if (!metrics.empty() && metrics.back().step >= step) return;
      std::this_thread::sleep_for(milliseconds(5));
    }
    FAIL() << "the run made no step";
  }
  bool HasTemporaries(const std::string& run) const {
    const fs::path checkpoints = train::RunPaths{tiny_.path(run)}.checkpoints();
    std::error_code none_yet;
    for (const auto& entry : fs::directory_iterator(checkpoints, none_yet)) {
      if (io::IsTemporary(entry.path())) return true;
    }
    return false;
  }
  // Stops rank `rank` while a checkpoint is half written, and leaves it so.
  bool StopDuringASave(const std::string& run, pid_t rank) const {
    const auto end = Clock::now() + kSlack;
    while (Clock::now() < end) {
      if (!HasTemporaries(run)) continue;
      kill(rank, SIGSTOP);
      // It may have done its part already: then the checkpoint is finished without it.
      std::this_thread::sleep_for(milliseconds(100));
      if (HasTemporaries(run)) return true;
      kill(rank, SIGCONT);
    }
    return false;
  }

  // One error, from a rank, and nothing of a run.
  void ExpectRefused(const Strings& command, const std::string& run,
                     const ::testing::Matcher<std::string>& message) {
    const Result r = Run(command);
    EXPECT_EQ(r.status, 2) << r.err;
    EXPECT_EQ(Count(r.err, "error: "), 1u) << r.err;
    EXPECT_THAT(r.err, message);
    EXPECT_FALSE(fs::exists(tiny_.path(run)));
    ExpectNoRankLeft(run);
  }

  train::TinyRun tiny_{"ranks"};
};

TEST_F(RanksTest, ProcessesTrainWhatThreadsTrainBitForBit) {
  TrainOnThreads("whole");
  const Result mpirun = Run(Mpirun(2, TrainWords("processes")));
  EXPECT_EQ(mpirun.status, 0) << mpirun.err;
  EXPECT_EQ(mpirun.err, "");
  EXPECT_THAT(mpirun.out, HasSubstr("2 ranks (mpi, parallel.dp=1 parallel.ep=2) of 1 thread"));
  for (const char* line : {"data: ", "report: ", "held-out: "}) {  // the first rank alone prints
    EXPECT_EQ(Count("\n" + mpirun.out, fmt::format("\n{}", line)), 1u) << mpirun.out;
  }
  testing::ExpectSameRun(tiny_, "processes", "whole");
  EXPECT_TRUE(fs::exists(train::RunPaths{tiny_.path("processes")}.report()));
  EXPECT_TRUE(fs::exists(train::RunPaths{tiny_.path("processes")}.final_model()));

  const Result launched = Run(Launch(2, TrainWords("launched")));
  EXPECT_EQ(launched.status, 0) << launched.err;
  EXPECT_EQ(launched.err, "");
  EXPECT_THAT(launched.out, AllOf(StartsWith("model: "), HasSubstr("2 ranks (mpi, "),
                                  Not(HasSubstr("<stdout>")), Not(HasSubstr("\r"))));
  testing::ExpectSameRun(tiny_, "launched", "whole");

  const Result threads = Run(Launch(2, TrainWords("threads", {"threads=2"}), {"--as", "threads"}));
  EXPECT_EQ(threads.status, 0) << threads.err;
  EXPECT_THAT(threads.out, HasSubstr("2 ranks (inproc, "));
  testing::ExpectSameRun(tiny_, "threads", "whole");
}

TEST_F(RanksTest, ThreadsOfARankAreThoseThatWereAskedFor) {
  const Strings few = {"train.steps=2", "threads=0"};
  setenv("OMP_NUM_THREADS", "3", 1);
  EXPECT_THAT(Run(Mpirun(2, TrainWords("omp", few))).out, HasSubstr("of 3 threads"));
  unsetenv("OMP_NUM_THREADS");
  EXPECT_THAT(Run(Mpirun(2, TrainWords("key", {"train.steps=2", "threads=2"}))).out,
              HasSubstr("of 2 threads"));
  // Else the ranks share the processors.
  const int each = std::max(AvailableCpus() / 3, 1);
  const Strings three = {"parallel.dp=3", "parallel.ep=1", "batch.global_tokens=96"};
  EXPECT_THAT(Run(Mpirun(3, TrainWords("share", few + three))).out,
              HasSubstr(fmt::format("3 ranks (mpi, parallel.dp=3 parallel.ep=1) of {} thread{}\n",
                                    each, each == 1 ? "" : "s")));
}

// mpirun notices and ends the others.
TEST_F(RanksTest, ARankThatIsKilledInAStepEndsTheOthersAndTheRunResumes) {
  for (const int rank : {0, 1}) {
    const std::string run = fmt::format("step{}", rank);
    testing::Process process(tiny_.path("."),
                             Mpirun(2, TrainWords(run, Endless({"checkpoint.every=5"}))));
    AwaitStep(run, 7);
    const auto pids = Pids(run);
    ASSERT_EQ(pids.size(), 2u);
    kill(pids.at(rank), SIGKILL);
    EXPECT_NE(process.Wait(), 0);
    EXPECT_EQ(Count(process.Errors(), "signal 9 (Killed)"), 1u) << process.Errors();
    EXPECT_LE(Count(process.Errors(), "error: "), 1u) << process.Errors();
    ExpectNoRankLeft(run);
    EXPECT_GE(tiny_.Newest(run).step(), 5);
    FinishAndCompare(run);
  }
}

TEST_F(RanksTest, ARankThatIsKilledInASaveEndsTheOthersAndTheRunResumes) {
  for (const int rank : {0, 1}) {
    const std::string run = fmt::format("save{}", rank);
    testing::Process process(tiny_.path("."),
                             Mpirun(2, TrainWords(run, Endless({"checkpoint.every=1"}))));
    AwaitStep(run, 3);
    const auto pids = Pids(run);
    ASSERT_EQ(pids.size(), 2u);
    ASSERT_TRUE(StopDuringASave(run, pids.at(rank)));
    const std::int64_t saved = tiny_.Newest(run).step();
    kill(pids.at(rank), SIGKILL);
    EXPECT_NE(process.Wait(), 0);
    EXPECT_LE(Count(process.Errors(), "error: "), 1u) << process.Errors();
    ExpectNoRankLeft(run);
    EXPECT_EQ(tiny_.Newest(run).step(), saved) << "a half-written checkpoint counts";
    EXPECT_TRUE(HasTemporaries(run));
    ExpectOtherLayoutResumes(run);
    FinishAndCompare(run);
  }
}

// What is half written counts for nothing, on whatever layout the run goes on.
TEST_F(RanksTest, AFullDiskInASaveOfAllRanksKeepsTheLastCheckpoint) {
  for (const char* background : {"false", "true"}) {
    const std::string run = fmt::format("full-{}", background);
    const Strings keys = {fmt::format("checkpoint.background={}", background), "threads=2"};
    const Strings shortly = keys + Strings{"train.steps=4", kDecayEnd};
    ASSERT_EQ(Run(Strings{CISTRON_PROGRAM} + TrainWords(run, shortly)).status, 0);
    {
      const Strings longer = keys + Endless({"checkpoint.every=2", "run.on_exists=resume"});
      testing::Process process(tiny_.path("."), Strings{CISTRON_PROGRAM} + TrainWords(run, longer),
                               {.file_size_limit = 30'000});
      EXPECT_EQ(process.Wait(), 3);
      EXPECT_EQ(Count(process.Errors(), "error: "), 1u) << process.Errors();
      EXPECT_THAT(process.Errors(), HasSubstr("cannot write"));
    }
    EXPECT_EQ(tiny_.Newest(run).step(), 4);
    EXPECT_FALSE(HasTemporaries(run));
    ExpectOtherLayoutResumes(run);
    FinishAndCompare(run);
  }
}

// A launcher that does not care about a rank that is gone: the others wait as long as the key says.
TEST_F(RanksTest, TheWatchdogEndsRanksWhoseFellowIsGone) {
  const Strings keys = Endless({"checkpoint.every=5", "parallel.timeout=3"});
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const std::string run = fmt::format("alone{}", signal);
    testing::Process process(tiny_.path("."),
                             Mpirun(2, TrainWords(run, keys), {"--enable-recovery"}));
    AwaitStep(run, 7);
    const auto pids = Pids(run);
    ASSERT_EQ(pids.size(), 2u);
    const auto begin = Clock::now();
    kill(pids.at(1), signal);
    process.Wait();
    EXPECT_GE(Clock::now() - begin, std::chrono::seconds(3));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3) + kSlack);
    EXPECT_EQ(Count(process.Errors(), "error: "), 1u) << process.Errors();
    EXPECT_THAT(process.Errors(), AllOf(HasSubstr("waited 3.0 s for rank 1"),
                                        HasSubstr("finished last: operation ")));
    ExpectNoRankLeft(run);
    FinishAndCompare(run);
  }
}

TEST_F(RanksTest, SignalsSaveOnAllRanksAndTheRunResumes) {
  // Slow steps, of which mpirun's second does not hold many.
  const Strings batch = {"batch.global_tokens=4096", "eval.every=0"};
  const Strings steps = Endless(batch);
  struct Case {
    const char* run;
    int signal;
    bool to_a_rank;  // else to the launcher
    Strings command;
  };
  const std::vector<Case> cases = {
      {"rank", SIGTERM, true, Mpirun(2, TrainWords("rank", steps))},
      {"mpirun", SIGTERM, false, Mpirun(2, TrainWords("mpirun", steps))},
      {"forwarded", SIGUSR1, false, Mpirun(2, TrainWords("forwarded", steps))},
      {"interrupt", SIGINT, false, Launch(2, TrainWords("interrupt", steps))},
      {"threads", SIGINT, false,
       Launch(2, TrainWords("threads", steps + Strings{"threads=2"}), {"--as", "threads"})},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.run);
    testing::Process process(tiny_.path("."), c.command);
    AwaitStep(c.run, 1);
    if (c.to_a_rank) {
      kill(Pids(c.run).at(1), c.signal);
    } else {
      process.Signal(c.signal);
    }
    const int status = process.Wait();
    EXPECT_EQ(Count(process.Errors(), "error: "), 0u) << process.Errors();
    ExpectNoRankLeft(c.run);
    // mpirun that is asked to end gives the ranks a second, which may be too short, and its status
    // says that it was asked.
    const bool by_mpirun = !c.to_a_rank && c.signal == SIGTERM;
    if (!by_mpirun) {
      EXPECT_EQ(status, 0) << process.Errors();
      EXPECT_THAT(process.Output(), HasSubstr("as asked; saved in"));
      EXPECT_EQ(tiny_.Newest(c.run).step(), tiny_.Metrics(c.run).back().step);
    }
    std::string shown;
    if (c.command[0] == CISTRON_PROGRAM) {
      // What it prints continues the run, on all ranks.
      const std::string output = process.Output(), mark = "To continue: ";
      ASSERT_THAT(output, HasSubstr(mark));
      const std::size_t at = output.find(mark) + mark.size();
      shown = output.substr(at, output.find('\n', at) - at);
      EXPECT_THAT(shown, HasSubstr(" launch -n 2 "));
    }
    FinishAndCompare(c.run, batch, shown);
  }
}

// Trap launch: a signal to it may come before its ranks catch any, and before they say a word.
TEST_F(RanksTest, LaunchSavesHoweverEarlyItIsAsked) {
  int number = 0;
  for (const int milliseconds_later : {0, 20, 100, 300}) {
    const std::string run = fmt::format("early{}", milliseconds_later);
    SCOPED_TRACE(run);
    testing::Process process(tiny_.path("."), Launch(2, TrainWords(run, Endless())));
    for (int i = 0; i < 2000 && Pids(run).empty(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    std::this_thread::sleep_for(milliseconds(milliseconds_later));
    process.Signal(number++ % 2 == 0 ? SIGTERM : SIGINT);
    EXPECT_EQ(process.Wait(), 0);
    EXPECT_EQ(process.Errors(),
              "launch: asked the ranks to save and stop; once more ends them now\n");
    EXPECT_THAT(process.Output(),
                AllOf(HasSubstr("as asked; saved in"), Not(HasSubstr("catches signals"))));
    EXPECT_EQ(tiny_.Newest(run).step(), tiny_.Metrics(run).back().step);
    ExpectNoRankLeft(run);
  }
}

TEST_F(RanksTest, LaunchThatIsAskedTwiceEndsWithoutSuccess) {
  testing::Process process(tiny_.path("."), Launch(2, TrainWords("twice", Endless())));
  for (int i = 0; i < 2000 && Pids("twice").size() < 2; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  kill(Pids("twice").at(1), SIGSTOP);  // it cannot save
  process.Signal(SIGINT);
  std::this_thread::sleep_for(milliseconds(1100));  // sooner it is the same request
  process.Signal(SIGINT);
  const auto begin = Clock::now();
  EXPECT_NE(process.Wait(), 0);
  EXPECT_LT(Clock::now() - begin, kSlack);
  ExpectNoRankLeft("twice");
}

TEST_F(RanksTest, NoRankOutlivesALaunchThatIsKilled) {
  testing::Process process(tiny_.path("."),
                           Launch(2, TrainWords("orphan", {"train.steps=100000"})));
  AwaitStep("orphan", 1);
  process.Signal(SIGKILL);
  process.Wait();
  ExpectNoRankLeft("orphan");
}

TEST_F(RanksTest, RanksThatWereStartedDifferentlyAreRefused) {
  for (const auto& [key, message] :
       {std::pair{"seed=2", "'seed: 1' and 'seed: 2'"},
        std::pair{"train.steps=61", "'  steps: 60' and '  steps: 61'"},
        std::pair{"parallel.timeout=5", "'  timeout: 600' and '  timeout: 5'"}}) {
    ExpectRefused(Mpirun(1, TrainWords("different")) + Strings{":", "-np", "1", CISTRON_PROGRAM} +
                      TrainWords("different", {key}),
                  "different",
                  AllOf(HasSubstr("error: rank 1 was started with another configuration"),
                        HasSubstr(message)));
  }
  // One that cannot even start, beside one that can.
  ExpectRefused(Mpirun(1, TrainWords("different")) + Strings{":", "-np", "1", CISTRON_PROGRAM} +
                    TrainWords("different", {"sead=2"}),
                "different", HasSubstr("error: rank 1: the command line: there is no key 'sead'"));
  ExpectRefused(Mpirun(1, TrainWords("different")) + Strings{":", "-np", "1", CISTRON_PROGRAM} +
                    TrainWords("different", {"--sead"}),
                "different", HasSubstr("--sead"));
}

// Of the same version and arguments: another build, or an old copy on one machine.
TEST_F(RanksTest, RanksOfAnotherProgramAreRefused) {
  const fs::path other = tiny_.path("cistron");
  fs::copy_file(CISTRON_PROGRAM, other);
  std::ofstream(other, std::ios::app) << "another";  // beyond what is loaded
  ExpectRefused(Mpirun(1, TrainWords("other")) + Strings{":", "-np", "1", other.string()} +
                    TrainWords("other"),
                "other",
                AllOf(HasSubstr("error: rank 1 was started with another configuration or program "
                                "than rank 0; they differ first in 'cistron "),
                      Not(HasSubstr("seed"))));
}

TEST_F(RanksTest, BadInputIsToldOnceWithNoProcessLeft) {
  struct Case {
    int ranks;
    Strings keys;
    const char* message;
  };
  std::vector<Case> cases = {
      {2,
       {"parallel.ep=4"},
       "parallel.dp=1 times parallel.ep=4 must be the number of ranks, which is 2; with that "
       "number "
       "and 4 experts: parallel.dp=2 parallel.ep=1, or parallel.dp=1 parallel.ep=2"},
      {3, {"parallel.ep=2"}, "must be the number of ranks, which is 3"},
      {1, {"parallel.ep=2"}, "must be the number of ranks, which is 1"},
      {3,
       {"parallel.ep=3", "batch.global_tokens=96"},
       "4 experts cannot be dealt evenly to 3 ranks"},
      {2, {"batch.global_tokens=32"}, "1 rows of 32 tokens cannot be dealt evenly to 2 ranks"},
      {2, {"data.train=nothing.fa"}, "nothing.fa"},
      {2, {"sead=2"}, "there is no key 'sead'"},
      {2, {"--config-name", "L99"}, "L99"},
      {2, {"--sead"}, "--sead"},
      {2, {"--ranks", "2"}, "leave it out under `mpirun -np 2`"},
  };
  if (!comm::nccl::IsBuilt()) {
    cases.push_back(
        {2, {"device=cuda"}, "2 ranks on GPUs exchange by NCCL, which this build has not"});
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    const Strings words = TrainWords("bad", c.keys);
    ExpectRefused(Mpirun(c.ranks, words), "bad", HasSubstr(c.message));
    if (c.keys[0] == "--ranks") continue;  // of threads
    ExpectRefused(Launch(c.ranks, words, {"--as", "threads"}), "bad", HasSubstr(c.message));
    // Its processes are those of mpirun above: one that meets the error by itself, one that others
    // tell.
    if (&c != &cases.front() && c.keys[0] != "sead=2") continue;
    ExpectRefused(Launch(c.ranks, words), "bad", HasSubstr(c.message));
  }
}

// Numbers whose products or conversions overflow, and more threads than there can be.
TEST_F(RanksTest, NumbersOfRanksBeyondReasonAreRefused) {
  const auto refused = [&](const Strings& keys, const char* message) {
    ExpectRefused(Strings{CISTRON_PROGRAM} + TrainWords("huge", keys), "huge", HasSubstr(message));
  };
  refused({"parallel.dp=4611686018427387904", "parallel.ep=4"}, "parallel.dp=4611686018427387904");
  refused({"--ranks", "4294967298"}, "4294967298 ranks cannot be threads");
  refused({"--ranks", "-1"}, "-1 ranks cannot be threads");
  refused({"parallel.dp=8192", "parallel.ep=1", "batch.global_tokens=262144"},
          "8192 ranks cannot be threads of one process, which are 1…4096: correct parallel.dp");
}

TEST_F(RanksTest, OtherVerbsRunAsOneProcess) {
  ExpectRefused(Mpirun(2, {"info"}), "none",
                HasSubstr("`cistron info` runs as one process, and 2 were started"));
  ExpectRefused(Mpirun(2, {"inform"}), "none", HasSubstr("there is no verb 'inform'"));
  const Result one = Run(Mpirun(1, {"info"}));
  EXPECT_EQ(one.status, 0) << one.err;
  const Result help = Run(Mpirun(2, {"train", "--help"}));
  EXPECT_EQ(help.status, 0) << help.err;
  EXPECT_EQ(Count(help.out, "Examples:"), 1u);
  const Result config = Run(Mpirun(2, TrainWords("none", {"--print-config"})));
  EXPECT_EQ(config.status, 0) << config.err;
  EXPECT_EQ(Count(config.out, "seed: "), 1u);
}

TEST_F(RanksTest, LaunchRefusesWhatItCannotStart) {
  ExpectRefused(Launch(0, TrainWords("none")), "none", HasSubstr("launch: -n says how many ranks"));
  ExpectRefused(Launch(2, {"info"}), "none", HasSubstr("ranks run `train`"));
  ExpectRefused(Launch(2, {}), "none", HasSubstr("launch without a verb"));
  ExpectRefused(Mpirun(1, Strings{"launch", "-n", "2"} + TrainWords("none")), "none",
                HasSubstr("launch starts ranks by itself"));
  // Without mpirun: threads, said; or refused where processes were asked for.
  const char* path = std::getenv("PATH");
  const std::string kept = path == nullptr ? "" : path;
  setenv("PATH", "/nowhere", 1);
  const Result threads = Run(Launch(2, TrainWords("fallback", {"train.steps=2"})));
  ExpectRefused(Launch(2, TrainWords("none"), {"--as", "processes"}), "none",
                HasSubstr("no mpirun in PATH"));
  setenv("PATH", kept.c_str(), 1);
  EXPECT_EQ(threads.status, 0) << threads.err;
  EXPECT_THAT(threads.out, AllOf(HasSubstr("ranks are threads of one process: there is no mpirun"),
                                 HasSubstr("2 ranks (inproc, ")));
}

}  // namespace
}  // namespace cistron
