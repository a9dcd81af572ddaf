// Ranks with a GPU each under mpirun: the cases of every transport, and how runs end. Where the
// machine has no two GPUs it says so.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "cistron/comm/nccl/nccl.h"
#include "cistron/comm/self.h"
#include "cistron/tensor/cuda_backend.h"
#include "tests/subprocess.h"

namespace cistron::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NcclTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::path(::testing::TempDir()) / fmt::format("cistron_nccl_test_{}", getpid());
    std::filesystem::create_directories(folder_);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("GTEST_COLOR", "no", 1);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Two ranks; the exit status, and what they printed in `output`.
  int Run(const std::string& what, int limit_ms, std::string& output) {
    testing::Process process(folder_, {CISTRON_MPIRUN, "--oversubscribe", "-np", "2",
                                       CISTRON_NCCL_RANK_TEST, what, std::to_string(limit_ms)});
    const int status = process.Wait();
    output = process.Output() + process.Errors();
    return status;
  }
  static std::size_t Gpus() { return cuda::Devices().size(); }

  std::filesystem::path folder_;
};

TEST_F(NcclTest, EveryCollectiveGivesTheClosedForm) {
  if (Gpus() < 2) GTEST_SKIP() << "this machine has " << Gpus() << " GPUs, and two ranks need two";
  for (const char* what : {"cases", "checked", "own_sums"}) {
    std::string output;
    EXPECT_EQ(Run(what, 60'000, output), 0) << what << "\n" << output;
  }
}

TEST_F(NcclTest, NamesARankThatWaits) {
  if (Gpus() < 2) GTEST_SKIP() << "this machine has " << Gpus() << " GPUs, and two ranks need two";
  std::string output;
  EXPECT_NE(Run("alone", 15'000, output), 0);
  EXPECT_THAT(output, AllOf(HasSubstr("error: comm: rank 0 of 2 in 'world' (nccl): operation 2, "
                                      "all_reduce sum of 8 f32: not ended after 15."),
                            HasSubstr("finished last: operation 1, all_reduce sum of 8 f32")));
}

TEST_F(NcclTest, CheckedRanksReportCallsThatDoNotMatch) {
  if (Gpus() < 2) GTEST_SKIP() << "this machine has " << Gpus() << " GPUs, and two ranks need two";
  std::string output;
  EXPECT_EQ(Run("mismatch", 60'000, output), 3);
  EXPECT_THAT(output, HasSubstr("error: comm: in 'world' rank 0 calls all_reduce sum of 8 f32 as "
                                "operation 1, which does not match rank 1, which calls all_reduce "
                                "sum of 9 f32 as operation 1"));
}

TEST_F(NcclTest, RefusesTwoRanksOnOneGpuAndNamesThem) {
  if (Gpus() < 1) GTEST_SKIP() << "this machine has no GPU";
  std::string output;
  EXPECT_EQ(Run("one_gpu", 60'000, output), 3);
  EXPECT_THAT(output, HasSubstr("error: nccl: ranks 0 and 1 are both on one GPU"));
}

TEST_F(NcclTest, SaysHowManyGpusThereAre) {
  if (Gpus() > 1) GTEST_SKIP() << "this machine has a GPU for each of two ranks";
  std::string output;
  EXPECT_EQ(Run("cases", 60'000, output), 3);
  EXPECT_THAT(output, HasSubstr("error: nccl: "));
}

}  // namespace
}  // namespace cistron::comm
