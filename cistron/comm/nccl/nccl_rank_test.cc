// What one rank does in the tests of nccl_test.cc: mpirun … nccl_rank_test WHAT LIMIT_MS
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "cistron/base/error.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/comm/nccl/testing/through_device.h"
#include "cistron/comm/testing/collective_cases.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::comm {
namespace {

Communicator* g_world = nullptr;  // tests of GoogleTest take no arguments
Device g_device;

class Collectives : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(Collectives, Nccl) {
  EXPECT_EQ(g_world->transport(), "nccl");
  const auto through = nccl::ThroughDevice(*g_world, g_device);
  GetParam().run(*through);
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(CollectiveCases()),
                         [](const auto& test) { return test.param.name; });

// Host tensors of the same communicator.
TEST(DeviceTensors, AndHostTensorsGoByTheControlCommunicator) {
  const Tensor t = Tensor::Zeros({3}, DType::kI64);
  for (std::int64_t& x : t.span<std::int64_t>()) x = g_world->rank() + 1;
  g_world->AllReduce(t);
  EXPECT_EQ(t.span<std::int64_t>()[2], g_world->size() * (g_world->size() + 1) / 2);
}

// The main stream waits for what was started, the host does not; memory that a transfer used may be
// given out again only behind it.
TEST(DeviceTensors, WorkWaitsByEvent) {
  Allocator& memory = cuda::DeviceAllocator(g_device.index);
  const std::int64_t n = std::int64_t{1} << 24;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Tensor host = Tensor::Zeros({n}, DType::kF32);
    for (float& x : host.span<float>()) x = static_cast<float>(g_world->rank() + repeat);
    Tensor t = host.To(g_device);
    {
      const Work work = g_world->AllReduceAsync(t);
      const Tensor result = Tensor::Empty({n}, DType::kF32, memory);
      work.Wait();
      CopyTo(t, result);
      t = result;
    }
    // What the sum was made in is free now, and is written to at once.
    const Tensor reused = Tensor::Zeros({n}, DType::kF32, memory);
    const Tensor got = t.ToHost();
    const auto ranks = static_cast<float>(g_world->size());
    const float sum = ranks * (ranks - 1) / 2 + ranks * static_cast<float>(repeat);
    EXPECT_EQ(got.span<float>()[0], sum);
    EXPECT_EQ(got.span<float>()[static_cast<std::size_t>(n - 1)], sum);
  }
}

int RunCases(Communicator& world) {
  g_world = &world;
  // An exception ends all ranks; caught here, it would leave the others waiting.
  GTEST_FLAG_SET(catch_exceptions, false);
  return RUN_ALL_TESTS();
}

// Rank 1 never comes; the stream of rank 0 waits, and so does the host.
int LeaveAlone(Communicator& world) {
  const Tensor t = Tensor::Zeros({8}, DType::kF32).To(g_device);
  world.AllReduce(t);  // connected
  t.ToHost();
  if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(2));
  world.AllReduce(t);
  t.ToHost();
  return 0;
}

int Mismatch(Communicator& world) {
  world.AllReduce(Tensor::Zeros({8 + world.rank()}, DType::kF32).To(g_device));
  return 0;
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 3) {
    std::fprintf(stderr,
                 "usage: nccl_rank_test cases|checked|own_sums|one_gpu|alone|mismatch LIMIT_MS\n");
    return 2;
  }
  const std::string what = argv[1];
  mpi::RunOptions options;
  options.status_of = [](const std::exception& e) {
    return dynamic_cast<const Error*>(&e) != nullptr ? 3 : 4;
  };
  return mpi::RunRank(
      [&](Communicator& control) {
        g_device = what == "one_gpu" ? Device{DeviceType::kCuda, 0} : nccl::DeviceOfRank(control);
        nccl::ConnectOptions connect;
        connect.communicator.limit = std::chrono::milliseconds(std::stol(argv[2]));
        connect.communicator.checked = what == "checked" || what == "mismatch";
        connect.own_sums = what == "own_sums";
        const auto world = nccl::Connect(control, g_device, connect);
        if (what == "alone") return LeaveAlone(*world);
        if (what == "mismatch") return Mismatch(*world);
        return RunCases(*world);
      },
      options);
}

}  // namespace
}  // namespace cistron::comm

int main(int argc, char** argv) {
  return cistron::comm::Main(argc, argv);
}
