// Memory of peers, without a GPU (testing/host_gpu.h): what one rank cannot do, all of them know.
#include "cistron/comm/nccl/peer_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <functional>
#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/nccl/testing/host_gpu.h"

namespace cistron::comm::nccl {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kThree = 3;

// What each of three ranks throws or says; rank 1 has the faults.
struct Said {
  std::vector<std::string> texts{kThree};
  std::vector<ErrorCode> codes{kThree};
};
Said OfRanks(const PeerFaults& faults, const std::function<std::string(Communicator&)>& work) {
  Said said;
  RunRanks(kThree, [&](Communicator& group) {
    const auto r = static_cast<std::size_t>(group.rank());
    SetPeerFaults(r == 1 ? faults : PeerFaults{});
    try {
      said.texts[r] = work(group);
    } catch (const Error& e) {
      said.texts[r] = e.message();
      said.codes[r] = e.code();
    }
    SetPeerFaults({});
  });
  return said;
}

std::string Allocate(Communicator& group) {
  PeerMemory memory(group, kHostGpu);
  void* block = memory.Allocate(1000);
  memory.Deallocate(block, 1000);
  return "taken";
}

TEST(PeerMemory, IsTheSameOnEveryRank) {
  std::vector<std::vector<std::byte*>> seen(kThree);
  RunRanks(kThree, [&](Communicator& group) {
    PeerMemory memory(group, kHostGpu);
    void* block = memory.Allocate(1000);
    for (int r = 0; r < kThree; ++r) {
      seen[static_cast<std::size_t>(group.rank())].push_back(memory.At(r, block));
    }
    EXPECT_EQ(memory.At(group.rank(), block), block);
    group.Barrier();
    EXPECT_EQ(seen[0], seen[static_cast<std::size_t>(group.rank())]);
    memory.Deallocate(block, 1000);
  });
  EXPECT_EQ(LiveBytes(), 0);
  EXPECT_EQ(OpenedByPeers(), 0);
}

TEST(PeerMemory, AFailureOfOneRankIsThatOfAll) {
  struct Case {
    PeerFaults faults;
    ErrorCode code;
    std::string text;
  };
  for (const Case& c :
       {Case{{.take = cudaErrorMemoryAllocation},
             ErrorCode::kOutOfMemory,
             "memory: the GPU of rank 1 has no 2 MiB for other ranks"},
        {{.take = cudaErrorUnknown}, ErrorCode::kInternal, "memory: the GPU of rank 1 failed"},
        {{.share = cudaErrorNotSupported},
         ErrorCode::kUnsupported,
         "memory: rank 1 cannot share memory of its GPU"},
        {{.open = cudaErrorInvalidResourceHandle},
         ErrorCode::kUnsupported,
         "memory: rank 1 cannot open memory of rank 0's GPU"}}) {
    SCOPED_TRACE(c.text);
    const Said said = OfRanks(c.faults, Allocate);
    EXPECT_THAT(said.codes, Each(c.code));
    EXPECT_THAT(said.texts, Each(HasSubstr(c.text)));
    EXPECT_THAT(said.texts, Each(said.texts[0]));
    EXPECT_EQ(LiveBytes(), 0);
    EXPECT_EQ(OpenedByPeers(), 0);
  }
}

std::string Try(Communicator& group) {
  return WhyTrialFails(group, kHostGpu);
}

TEST(PeerTrial, SaysNothingWherePeersReachEachOther) {
  const Said said = OfRanks({}, Try);
  EXPECT_THAT(said.texts, Each(""));
  EXPECT_EQ(LiveBytes(), 0);
}

TEST(PeerTrial, SaysWhatFailsOnEveryRank) {
  struct Case {
    PeerFaults faults;
    std::string text;
  };
  for (const Case& c :
       {Case{{.share = cudaErrorNotSupported}, "rank 1 cannot share memory of its GPU"},
        {{.open = cudaErrorInvalidResourceHandle}, "rank 1 cannot open memory of rank 0's GPU"},
        {{.write = cudaErrorUnknown}, "rank 1 cannot write to memory of rank 0's GPU"},
        {{.loses_writes = true},
         "what rank 1 writes to memory of rank 0's GPU does not get there"}}) {
    SCOPED_TRACE(c.text);
    const Said said = OfRanks(c.faults, Try);
    EXPECT_THAT(said.codes, Each(ErrorCode{}));  // nothing was thrown
    EXPECT_THAT(said.texts, Each(HasSubstr(c.text)));
    EXPECT_THAT(said.texts, Each(said.texts[0]));
    EXPECT_EQ(LiveBytes(), 0);
    EXPECT_EQ(OpenedByPeers(), 0);
  }
}

// Without memory a run fails the one way as the other: that is no reason to go by the hosts.
TEST(PeerTrial, TooLittleMemoryIsAnError) {
  const Said said = OfRanks({.take = cudaErrorMemoryAllocation}, Try);
  EXPECT_THAT(said.codes, Each(ErrorCode::kOutOfMemory));
}

}  // namespace
}  // namespace cistron::comm::nccl
