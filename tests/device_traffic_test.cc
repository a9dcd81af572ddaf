// Trap concurrent-corruption: grouped products beside other work of the same GPU. A program of its
// own, because launches of the others wait for their kernels (testing/cuda.h), which would keep the
// streams apart. Beside NCCL's own traffic: gpu_layouts_rank_test.cc.
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "cistron/tensor/cuda_backend.h"
#include "cistron/testing/device_traffic.h"
#include "cistron/testing/repeated_products.h"

namespace cistron {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

class DeviceTraffic : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::Devices().empty()) GTEST_SKIP() << "no GPU: " << cuda::Describe();
  }
};

TEST_F(DeviceTraffic, ConcurrentCorruption) {
  constexpr int kRepeats = 1000;
  const ops::Context ctx(kGpu);
  const testing::RepeatedProducts products(ctx);
  testing::DeviceTraffic traffic(kGpu);
  while (traffic.rounds() == 0) std::this_thread::yield();
  const std::int64_t before = traffic.rounds();
  int wrong = 0;
  for (int i = 0; i < kRepeats; ++i) wrong += products.CountWrong();
  const std::int64_t rounds = traffic.rounds() - before;
  traffic.Stop();
  EXPECT_EQ(wrong, 0) << "of " << 3 * kRepeats << " products";
  // Without traffic nothing is proved.
  std::printf("%d repeats beside %d rounds of traffic\n", kRepeats, static_cast<int>(rounds));
  EXPECT_GT(rounds, kRepeats / 50);
}

// One row of y that is what it was before would be counted.
TEST_F(DeviceTraffic, WrongProductsAreCounted) {
  const testing::RepeatedProducts products{ops::Context(kGpu)};
  EXPECT_EQ(products.CountWrong(), 0);
  EXPECT_EQ(
      products.CountWrong(
          {}, [](std::span<const Tensor> results) { FillPoison(results[0].Slice(0, 1234, 1)); }),
      1);
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
