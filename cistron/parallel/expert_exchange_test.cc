// Rows of experts between ranks with a GPU each, under mpirun. Where the machine has no two GPUs it
// says so.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cistron/tensor/cuda_backend.h"
#include "tests/subprocess.h"

namespace cistron::parallel {
namespace {

// Two ranks; the exit status, and what they printed.
int Launch(const std::vector<std::string>& arguments, std::string& output) {
  const auto folder = std::filesystem::path(::testing::TempDir()) /
                      fmt::format("cistron_expert_exchange_{}", getpid());
  std::filesystem::create_directories(folder);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  std::vector<std::string> command = {CISTRON_MPIRUN, "-np", "2",
                                      CISTRON_EXPERT_EXCHANGE_RANK_TEST};
  command.insert(command.end(), arguments.begin(), arguments.end());
  testing::Process process(folder, command);
  const int status = process.Wait();
  output = process.Output() + process.Errors();
  std::filesystem::remove_all(folder);
  return status;
}

TEST(ExpertExchange, BetweenTwoGpusIsThatOfTheHosts) {
  const std::size_t gpus = cuda::Devices().size();
  if (gpus < 2) GTEST_SKIP() << "this machine has " << gpus << " GPUs, and two ranks need two";
  std::string output;
  EXPECT_EQ(Launch({}, output), 0) << output;
}

TEST(ExpertExchange, NamesTheRankThatAKernelWaitsFor) {
  const std::size_t gpus = cuda::Devices().size();
  if (gpus < 2) GTEST_SKIP() << "this machine has " << gpus << " GPUs, and two ranks need two";
  std::string output;
  EXPECT_NE(Launch({"alone"}, output), 0);
  EXPECT_THAT(output, ::testing::AllOf(::testing::HasSubstr("rows to experts: not ended after 20."),
                                       ::testing::HasSubstr("waits for rank 1")));
}

}  // namespace
}  // namespace cistron::parallel
