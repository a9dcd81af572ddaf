// Ranks as processes under mpirun: the cases of every transport, and how runs end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <thread>

#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/testing/collective_cases.h"
#include "tests/subprocess.h"

namespace cistron::comm {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr int kLimitMs = 1500;
// For a machine that does other things, too.
constexpr std::chrono::seconds kSlack{20};

class MpiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::path(::testing::TempDir()) / fmt::format("cistron_mpi_test_{}", getpid());
    std::filesystem::create_directories(folder_);
    // Tests run as root in containers, on fewer processors than ranks.
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("GTEST_COLOR", "no", 1);
    // The library leaks a little at its end.
    setenv("ASAN_OPTIONS", "detect_leaks=0:allocator_may_return_null=1", 1);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::vector<std::string> Command(int ranks, const std::string& what, int limit_ms,
                                   const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = {CISTRON_MPIRUN, "--oversubscribe", "--mca",
                                        "mpi_yield_when_idle", "1"};
    command.insert(command.end(), more.begin(), more.end());
    command.insert(command.end(), {"-np", std::to_string(ranks), CISTRON_MPI_RANK_TEST, what,
                                   std::to_string(limit_ms)});
    return command;
  }

  // Process ids by rank, once all ranks have told theirs.
  std::map<int, pid_t> Pids(const testing::Process& process, std::size_t ranks) {
    std::map<int, pid_t> pids;
    for (int i = 0; i < 4000 && pids.size() < ranks; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::string output = process.Output();
      static const std::regex kLine("pid (\\d+) of rank (\\d+)\n");
      for (auto it = std::sregex_iterator(output.begin(), output.end(), kLine);
           it != std::sregex_iterator(); ++it) {
        pids[std::stoi((*it)[2])] = std::stoi((*it)[1]);
      }
    }
    EXPECT_EQ(pids.size(), ranks) << process.Errors();
    return pids;
  }

  // Nothing is left of them; their parent, mpirun, has gone before.
  void ExpectGone(const std::map<int, pid_t>& pids) {
    for (const auto& [rank, pid] : pids) {
      bool gone = false;
      for (int i = 0; i < 400 && !gone; ++i) {
        gone = kill(pid, 0) != 0 && errno == ESRCH;
        if (!gone) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_TRUE(gone) << "rank " << rank << " still runs";
    }
  }

  static std::size_t Count(const std::string& text, const std::string& part) {
    std::size_t count = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++count;
    return count;
  }

  std::filesystem::path folder_;
};

TEST_F(MpiTest, Describes) {
  EXPECT_TRUE(mpi::IsBuilt());
  EXPECT_THAT(mpi::Describe(), HasSubstr("MPI"));
  EXPECT_FALSE(mpi::IsLaunched());
}

TEST_F(MpiTest, Collectives) {
  const std::vector<std::pair<std::string, int>> runs = {
      {"cases", 1}, {"cases", 3}, {"checked", 4}, {"pieces", 2}};
  const std::string passed = fmt::format("[  PASSED  ] {} tests.", CollectiveCases().size());
  for (const auto& [what, ranks] : runs) {
    testing::Process process(folder_, Command(ranks, what, 120'000));
    EXPECT_EQ(process.Wait(), 0) << process.Output() << process.Errors();
    EXPECT_EQ(Count(process.Output(), passed), static_cast<std::size_t>(ranks)) << process.Output();
    EXPECT_EQ(process.Errors(), "");
  }
}

// mpirun notices it and ends the others.
TEST_F(MpiTest, ARankThatIsKilledEndsTheOthers) {
  testing::Process process(folder_, Command(3, "forever", kLimitMs));
  const auto pids = Pids(process, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto begin = Clock::now();
  kill(pids.at(1), SIGKILL);
  EXPECT_NE(process.Wait(), 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(kLimitMs) + kSlack);
  EXPECT_EQ(Count(process.Errors(), "signal 9 (Killed)"), 1u) << process.Errors();
  EXPECT_LE(Count(process.Errors(), "error: "), 1u) << process.Errors();
  ExpectGone(pids);
}

// A launcher that does not care: the watchdog of a rank that waits ends the run, with one message.
TEST_F(MpiTest, ARankThatIsKilledUnnoticedEndsTheOthersByTheWatchdog) {
  testing::Process process(folder_, Command(3, "forever", kLimitMs, {"--enable-recovery"}));
  const auto pids = Pids(process, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto begin = Clock::now();
  kill(pids.at(1), SIGKILL);
  process.Wait();  // with that option mpirun's status is 0, whatever happened
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(kLimitMs) + kSlack);
  EXPECT_EQ(Count(process.Errors(), "error: "), 1u) << process.Errors();
  EXPECT_THAT(process.Errors(), HasSubstr("waited 1.5 s for rank"));
  ExpectGone(pids);
}

// A rank that hangs: it is named, and ended with the others.
TEST_F(MpiTest, ARankThatIsStoppedFiresTheWatchdog) {
  for (const int stopped : {0, 1}) {
    testing::Process process(folder_, Command(3, "forever", kLimitMs));
    const auto pids = Pids(process, 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto begin = Clock::now();
    kill(pids.at(stopped), SIGSTOP);
    EXPECT_EQ(process.Wait(), 3);
    EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(kLimitMs) + kSlack);
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(kLimitMs));
    const std::string errors = process.Errors();
    EXPECT_EQ(Count(errors, "error: "), 1u) << errors;
    EXPECT_THAT(errors,
                AllOf(HasSubstr("all_reduce sum of 50000 f32 (operation "),
                      HasSubstr("waited 1.5 s for rank"), HasSubstr("finished last: operation ")));
    EXPECT_THAT(errors, HasSubstr(fmt::format("{}", stopped)));
    ExpectGone(pids);
  }
}

// MPI itself would wait for it without end.
TEST_F(MpiTest, ARankThatNeverStartsEndsTheOthers) {
  testing::Process process(folder_, Command(3, "stops_first", kLimitMs));
  EXPECT_EQ(process.Wait(), 3);
  EXPECT_EQ(Count(process.Errors(), "error: "), 1u) << process.Errors();
  EXPECT_THAT(process.Errors(), HasSubstr("error: mpi: rank 1 waited 1.5 s in MPI_Init"));
}

TEST_F(MpiTest, CollectivesThatDoNotMatchAreReported) {
  testing::Process checked(folder_, Command(3, "mismatch", 60'000));
  EXPECT_EQ(checked.Wait(), 3);
  EXPECT_EQ(Count(checked.Errors(), "error: "), 1u) << checked.Errors();
  EXPECT_THAT(checked.Errors(),
              AllOf(HasSubstr("all_reduce sum of 8 f32"), HasSubstr("all_reduce sum of 9 f32"),
                    HasSubstr("operation 2 of 'world'")));
  testing::Process unchecked(folder_, Command(3, "unchecked", 60'000));
  EXPECT_EQ(unchecked.Wait(), 3);
  EXPECT_EQ(Count(unchecked.Errors(), "error: "), 1u) << unchecked.Errors();
  EXPECT_THAT(unchecked.Errors(),
              AnyOf(HasSubstr("rank 1 sent more than the 32 bytes that this rank expects"),
                    HasSubstr("sent 32 bytes where this rank expects 36")));
}

TEST_F(MpiTest, AnExceptionEndsEveryProcessWithItsMessageAndStatus) {
  testing::Process process(folder_, Command(3, "throw", 600'000));
  const auto pids = Pids(process, 3);
  EXPECT_EQ(process.Wait(), 4);
  EXPECT_EQ(Count(process.Errors(), "error: "), 1u) << process.Errors();
  EXPECT_THAT(process.Errors(), HasSubstr("error: the disk is on fire\n"));
  ExpectGone(pids);
}

TEST_F(MpiTest, AnErrorOfAllRanksIsSaidOnceByTheFirst) {
  testing::Process process(folder_, Command(3, "throw_everywhere", 600'000));
  EXPECT_EQ(process.Wait(), 3);
  EXPECT_EQ(Count(process.Errors(), "error: no such preset: L9\n"), 1u) << process.Errors();
}

}  // namespace
}  // namespace cistron::comm
