// What the communicator over NCCL asks of NCCL, without a GPU: the cases of every transport for one
// to five ranks, whoever adds, in one round and in many; and what the watchdog says.
#include "cistron/comm/nccl/nccl_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "cistron/comm/inproc.h"
#include "cistron/comm/nccl/testing/host_gpu.h"
#include "cistron/comm/nccl/testing/through_device.h"
#include "cistron/comm/testing/collective_cases.h"

namespace cistron::comm::nccl {
namespace {

void RunOn(int ranks, const ConnectOptions& options,
           const std::function<void(Communicator&)>& work) {
  RunRanks(ranks, [&](Communicator& control) {
    ConnectOptions complete = options;
    if (!complete.on_failure) {
      complete.on_failure = [](const Error& e) { ADD_FAILURE() << e.message(); };
    }
    const auto world = MakeNcclCommunicator(control, kHostGpu, complete);
    work(*world);
  });
}

struct Way {
  const char* name;
  ConnectOptions options;
};

class Collectives : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(Collectives, OverNccl) {
  const Way ways[] = {
      {"plain", {}},
      {"checked", {.communicator = {.checked = true}}},
      {"own sums", {.own_sums = true}},
      {"many rounds", {.own_sums = true, .scratch_bytes = 50'000}},
  };
  for (const Way& way : ways) {
    for (const int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", way.name, ranks));
      RunOn(ranks, way.options, [](Communicator& world) {
        const auto through = ThroughDevice(world, kHostGpu);
        GetParam().run(*through);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(CollectiveCases()),
                         [](const auto& test) { return test.param.name; });

// Two ranks have one order of sums, so NCCL adds; three do not.
TEST(Reductions, AreNcclsWhereItsOrderIsThatOfTheRanks) {
  const auto sums = [](int ranks, const ConnectOptions& options) {
    const int before = NcclSums();
    RunOn(ranks, options, [](Communicator& world) {
      world.AllReduce(Tensor::Zeros({30}, DType::kF32).To(kHostGpu));
      const Tensor part = Tensor::Zeros({30 / world.size()}, DType::kBF16).To(kHostGpu);
      world.ReduceScatter(Tensor::Zeros({30}, DType::kBF16).To(kHostGpu), part);
    });
    return NcclSums() - before;
  };
  EXPECT_EQ(sums(2, {}), 4);
  EXPECT_EQ(sums(3, {}), 0);
  EXPECT_EQ(sums(3, {.rank_order = false}), 6);
  EXPECT_EQ(sums(2, {.own_sums = true}), 0);
  EXPECT_EQ(sums(1, {}), 0);
}

// However many sums are under way, the memory of one is enough.
TEST(Reductions, SumsThatAreStartedShareTheirScratchMemory) {
  constexpr std::int64_t kElements = 3000;
  std::atomic<std::int64_t> most{0};
  RunOn(3, {}, [&](Communicator& world) {
    std::vector<Tensor> tensors;
    for (const std::int64_t n : {kElements / 2, kElements, kElements, kElements / 3, kElements}) {
      const Tensor host = Tensor::Zeros({n}, DType::kF32);
      for (float& x : host.span<float>()) x = static_cast<float>(world.rank() + 1);
      tensors.push_back(host.To(kHostGpu));
    }
    world.Barrier();
    const std::int64_t before = LiveBytes();
    world.Barrier();
    std::vector<Work> works;
    for (const Tensor& t : tensors) works.push_back(world.AllReduceAsync(t));
    world.Barrier();
    most = LiveBytes() - before;
    world.Barrier();
    for (Work& work : works) work.Wait();
    for (const Tensor& t : tensors) {
      const Tensor sum = t.ToHost();
      EXPECT_EQ(sum.span<float>().front(), 6);
      EXPECT_EQ(sum.span<float>().back(), 6);
    }
  });
  // Of each rank: the largest, and what makes its thirds multiples of 16 bytes.
  EXPECT_GE(most, 3 * kElements * 4);
  EXPECT_LE(most, 3 * (kElements * 4 + 3 * 48));
}

TEST(Reductions, TensorsOfTheHostGoByTheControlCommunicator) {
  RunOn(3, {}, [](Communicator& world) {
    const Tensor t = Tensor::Zeros({1}, DType::kI64);
    *t.data<std::int64_t>() = world.rank();
    world.AllReduce(t);
    EXPECT_EQ(t.item(), 3);
    EXPECT_EQ(world.transport(), "nccl");
  });
}

TEST(Errors, TensorsOfOtherDevicesAreRefused) {
  RunOn(1, {}, [](Communicator& world) {
    float x = 0;
    try {
      world.AllReduce(Tensor::Borrow(&x, {1}, DType::kF32, {DeviceType::kCuda, 3}));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(e.message(), ::testing::HasSubstr("is on cuda:3, and this rank's GPU is cuda:0"));
    }
  });
}

TEST(Errors, CheckedRanksReportCountsThatDoNotMatch) {
  try {
    RunOn(2, {.communicator = {.checked = true}}, [](Communicator& world) {
      const Tensor input = Tensor::Zeros({4, 2}, DType::kF32).To(kHostGpu);
      const Tensor output = Tensor::Zeros({4, 2}, DType::kF32).To(kHostGpu);
      const std::vector<std::int64_t> send = {1, 1}, receive = {1, world.rank() == 0 ? 2 : 1};
      const std::vector<std::int64_t> own =
          world.rank() == 0 ? receive : std::vector<std::int64_t>{1, 1};
      world.AllToAll(input, send, output, own);
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_THAT(e.message(), ::testing::HasSubstr("rank 0 sends 1 and expects 2, rank 1 expects 1 "
                                                  "and sends 1"));
  }
}

TEST(Watchdog, NamesRankOperationAndTheOneThatFinishedLast) {
  std::mutex mutex;
  std::condition_variable changed;
  std::string message;
  ConnectOptions options;
  options.communicator.limit = std::chrono::milliseconds(200);
  options.on_failure = [&](const Error& e) {
    const std::lock_guard lock(mutex);
    message = e.message();
    changed.notify_all();
  };
  RunRanks(2, [&](Communicator& control) {
    // One rank of two watches, so that one message comes.
    ConnectOptions own = options;
    if (control.rank() == 1) own.on_failure = [](const Error&) {};
    const auto world = MakeNcclCommunicator(control, kHostGpu, own);
    world->AllReduce(Tensor::Zeros({4}, DType::kF32).To(kHostGpu));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it sees the end of the first
    control.Barrier();
    LetEventsEnd(1);  // the GPU reaches the second, which does not end
    world->AllReduce(Tensor::Zeros({5}, DType::kF32).To(kHostGpu));
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(20), [&] { return !message.empty(); });
  });
  EXPECT_THAT(message, ::testing::StartsWith("comm: rank 0 of 2 in 'world' (nccl): operation 2, "
                                             "all_reduce sum of 5 f32: not ended after 0."));
  EXPECT_THAT(message, ::testing::HasSubstr("finished last: operation 1, all_reduce sum of 4 f32"));
}

// Hosts are steps ahead of the GPU; what it computes until it reaches an operation is no waiting.
TEST(Watchdog, CountsFromWhenTheGpuReachesAnOperation) {
  std::mutex mutex;
  std::condition_variable changed;
  std::string message;
  const auto told = [&](std::chrono::milliseconds within) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, within, [&] { return !message.empty(); });
  };
  RunRanks(1, [&](Communicator& alone) {
    ConnectOptions options;
    options.communicator.limit = std::chrono::milliseconds(300);
    options.on_failure = [&](const Error& e) {
      const std::lock_guard lock(mutex);
      message = e.message();
      changed.notify_all();
    };
    const auto world = MakeNcclCommunicator(alone, kHostGpu, options);
    LetEventsEnd(0);
    for (const char* text : {"first", "second"}) Watch(*world, text, [] {});
    EXPECT_FALSE(told(std::chrono::milliseconds(1000))) << "before either was reached: " << message;
    LetEventsEnd(-2);  // the first has ended, the second is not reached
    EXPECT_FALSE(told(std::chrono::milliseconds(1000))) << "before the second was: " << message;
    LetEventsEnd(-1);
    EXPECT_TRUE(told(std::chrono::seconds(20)));
    LetEventsEnd(0);
  });
  EXPECT_THAT(message, ::testing::HasSubstr("operation 2, second: not ended after 0."));
}

}  // namespace
}  // namespace cistron::comm::nccl

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
