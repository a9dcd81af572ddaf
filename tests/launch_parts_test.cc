// Parts of the program that ranks need, without ranks: what a launcher leaves in the environment, a
// build without MPI, and the output of ranks taken apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "apps/cistron/command.h"
#include "apps/cistron/launched_rank.h"
#include "apps/cistron/rank_output.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"

namespace cistron::app {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Lines = std::vector<std::pair<int, std::string>>;

class LaunchedRankTest : public ::testing::Test {
 protected:
  LaunchedRankTest() { Clear(); }
  ~LaunchedRankTest() override { Clear(); }
  static void Clear() {
    for (const char* name :
         {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_RANK",
          "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
          "SLURM_NTASKS_PER_NODE"}) {
      unsetenv(name);
    }
  }
  static void OfMpirun(const char* rank, const char* size, const char* local_size) {
    setenv("OMPI_COMM_WORLD_RANK", rank, 1);
    setenv("OMPI_COMM_WORLD_SIZE", size, 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", local_size, 1);
  }
};

TEST_F(LaunchedRankTest, FindsWhatMpirunAndSrunSay) {
  EXPECT_FALSE(FindLaunchedRank());
  OfMpirun("3", "8", "4");
  auto rank = FindLaunchedRank();
  ASSERT_TRUE(rank);
  EXPECT_EQ(rank->rank, 3);
  EXPECT_EQ(rank->size, 8);
  EXPECT_EQ(rank->local_size, 4);
  EXPECT_EQ(rank->start, "mpirun -np 8");
  Clear();
  setenv("PMIX_RANK", "5", 1);
  setenv("SLURM_STEP_NUM_TASKS", "6", 1);
  setenv("SLURM_STEP_NUM_NODES", "4", 1);
  rank = FindLaunchedRank();
  ASSERT_TRUE(rank);
  EXPECT_EQ(rank->rank, 5);
  EXPECT_EQ(rank->size, 6);
  EXPECT_EQ(rank->local_size, 2);  // 6 on 4 machines: one has two
  EXPECT_EQ(rank->start, "srun -n 6");
}

// This process is bound to what its parent has: a fair share of that is within.
TEST_F(LaunchedRankTest, RanksOfAMachineShareItsProcessors) {
  const int machine = AvailableCpusOfParent();
  for (const int ranks : {1, 2, 3, machine, machine + 1}) {
    LaunchedRank rank;
    rank.local_size = ranks;
    const ThreadShare share = ShareOfProcessors(rank);
    EXPECT_EQ(share.threads, std::min(AvailableCpus(), std::max(machine / ranks, 1))) << ranks;
    EXPECT_EQ(share.notice.empty(), AvailableCpus() >= std::max(machine / ranks, 1)) << ranks;
  }
}

// One message, from the first rank.
TEST_F(LaunchedRankTest, ABuildWithoutMpiSaysSo) {
  OfMpirun("0", "2", "2");
  const auto nothing = [](comm::Communicator&) { FAIL() << "no rank can run"; };
  try {
    RunLaunched(FindLaunchedRank().value(), {}, nothing);
    FAIL() << "it ran";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(e.message(),
                AllOf(HasSubstr("2 ranks were started"), HasSubstr("this build has no MPI"),
                      HasSubstr("libopenmpi-dev")));
  }
  OfMpirun("1", "2", "2");
  EXPECT_EQ(RunLaunched(FindLaunchedRank().value(), {}, nothing), kBadUsage);
}

Lines LinesOf(const std::string& stream, std::size_t piece) {
  Lines lines;
  RankOutput output([&](int rank, const std::string& line) { lines.emplace_back(rank, line); });
  for (std::size_t at = 0; at < stream.size(); at += piece) output.Add(stream.substr(at, piece));
  output.Finish();
  return lines;
}

// Wherever the stream is cut, also within a tag.
TEST(RankOutput, TakesLinesOfRanksApart) {
  const std::string stream =
      "[1,0]<stdout>:step 1 [of 3]\n"
      "[1,1]<stdout>:begun [1,10]<stdout>:ten\n"
      "[1,1]<stdout>:ended\n"
      "----\n"
      "[vm:12] no tag\n"
      "[1,0]<stderr>:\n"
      "[1,2]<stdout>:[1,2] is a pair\n"
      "[1,0]<stdout>:no newline";
  for (std::size_t piece = 1; piece <= stream.size(); ++piece) {
    EXPECT_THAT(LinesOf(stream, piece),
                ElementsAre(Pair(0, "step 1 [of 3]"), Pair(10, "ten"), Pair(1, "begun ended"),
                            Pair(-1, "----"), Pair(-1, "[vm:12] no tag"), Pair(0, ""),
                            Pair(2, "[1,2] is a pair"), Pair(0, "no newline")))
        << piece;
  }
}

TEST(RankOutput, BytesThatAreAlmostATagAreText) {
  for (const std::string text : {"[", "[1,2]<std", "[1,x]<stdout>:a", "[1]<stdout>:a", "[[1,2"}) {
    EXPECT_THAT(LinesOf(text, 1), ElementsAre(Pair(-1, text)));
  }
}

}  // namespace
}  // namespace cistron::app
