// Training on ranks with a GPU each, under mpirun. Where the machine has no two GPUs it says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "cistron/tensor/cuda_backend.h"
#include "tests/subprocess.h"

namespace cistron::train {
namespace {

TEST(GpuLayouts, TwoGpusTrainWhatOneTrains) {
  const std::size_t gpus = cuda::Devices().size();
  if (gpus < 2) GTEST_SKIP() << "this machine has " << gpus << " GPUs, and two ranks need two";
  const auto folder =
      std::filesystem::path(::testing::TempDir()) / fmt::format("cistron_gpu_layouts_{}", getpid());
  std::filesystem::create_directories(folder);
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  testing::Process process(folder, {CISTRON_MPIRUN, "-np", "2", CISTRON_GPU_LAYOUTS_RANK_TEST});
  EXPECT_EQ(process.Wait(), 0) << process.Output() << process.Errors();
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace cistron::train
