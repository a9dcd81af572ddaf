// How busy a device was, from the times of its kernels; and on a GPU, that a trace sees what ran.
#include "cistron/tensor/kernel_trace.h"

#include <gtest/gtest.h>

#include "cistron/tensor/cuda_backend.h"
#include "cistron/tensor/cuda_graph.h"

namespace cistron::cuda {
namespace {

TEST(KernelTrace, NothingRan) {
  const DeviceTime time = TimeOf({});
  EXPECT_EQ(time.span_ms, 0);
  EXPECT_EQ(time.kernels, 0);
  EXPECT_EQ(time.gap_share(), 0);
}

TEST(KernelTrace, GapsAreWhatNoKernelCovers) {
  // 1…3, 3…4, a gap of one, 5…8 with 6…7 in it, 7…9; in another order.
  const std::uint64_t ms = 1000000;
  const DeviceTime time = TimeOf(
      {{5 * ms, 8 * ms}, {1 * ms, 3 * ms}, {6 * ms, 7 * ms}, {3 * ms, 4 * ms}, {7 * ms, 9 * ms}});
  EXPECT_DOUBLE_EQ(time.span_ms, 8);
  EXPECT_DOUBLE_EQ(time.busy_ms, 7);
  EXPECT_EQ(time.kernels, 5);
  EXPECT_DOUBLE_EQ(time.gap_share(), 1.0 / 8);
}

// Fills in a graph that was captured before the trace began, replayed.
TEST(KernelTrace, SeesReplaysOfGraphs) {
  if (!IsBuilt() || Devices().empty()) GTEST_SKIP() << "there is no GPU here";
  if (!KernelTrace::WhyNot().empty()) GTEST_SKIP() << KernelTrace::WhyNot();
  const Device device{DeviceType::kCuda, 0};
  RequireDevice(0);
  Allocator& allocator = DeviceAllocator(0);
  const std::size_t bytes = std::size_t{64} << 20;
  void* data = allocator.Allocate(bytes);
  Graph graph(device, [&] {
    for (int i = 0; i < 3; ++i) FillBytes(data, device, 1, bytes);
  });
  for (int round = 0; round < 2; ++round) {
    KernelTrace trace;
    graph.Launch();
    trace.Restart(device);
    for (int i = 0; i < 4; ++i) graph.Launch();
    const DeviceTime time = trace.Read(device);
    EXPECT_EQ(time.kernels, 12);
    EXPECT_GT(time.busy_ms, 0);
    EXPECT_LE(time.busy_ms, time.span_ms);
  }
  allocator.Deallocate(data, bytes);
}

}  // namespace
}  // namespace cistron::cuda
