#include "cistron/comm/nccl/peer_memory.h"

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "cistron/tensor/block_cache.h"
#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda/stream_allocator.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::comm::nccl {
namespace {

using cuda::Check;

// Of every rank, in their order. T is plain bytes, which travel as they are.
template <class T>
std::vector<T> GatherBytes(Communicator& group, T own) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  std::vector<T> all(static_cast<std::size_t>(group.size()));
  group.AllGather(Tensor::Borrow(&own, {kBytes}, DType::kU8),
                  Tensor::Borrow(all.data(), {group.size() * kBytes}, DType::kU8));
  return all;
}

struct Place {
  std::array<char, 256> machine{};
  std::array<char, 16> gpu{};  // UUID
  std::int64_t process = 0;
};

// Why this rank's GPU does not reach another; kOther has more than one cause.
enum class Reach : std::int32_t { kReaches, kOtherMachine, kSameProcess, kHidden, kNoAccess };

Reach ReachOf(const Place& own, const Place& other, int device) {
  if (own.machine != other.machine) return Reach::kOtherMachine;
  if (own.process == other.process) return Reach::kSameProcess;
  int count = 0;
  Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    Check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    if (std::memcmp(properties.uuid.bytes, other.gpu.data(), other.gpu.size()) != 0) continue;
    int can = 0;
    Check(cudaDeviceCanAccessPeer(&can, device, i), "cudaDeviceCanAccessPeer");
    return can != 0 ? Reach::kReaches : Reach::kNoAccess;
  }
  return Reach::kHidden;
}

const char* TextOf(Reach reach) {
  switch (reach) {
    case Reach::kReaches: break;
    case Reach::kOtherMachine: return "is on another machine";
    case Reach::kSameProcess: return "is a thread of the same process";
    case Reach::kHidden: return "has a GPU that it does not see (CUDA_VISIBLE_DEVICES)";
    case Reach::kNoAccess: return "has a GPU whose memory its own cannot reach";
  }
  return "";
}

}  // namespace

std::string WhyNoPeers(Communicator& group, Device device) {
  if (group.size() > PeerMemory::kMostRanks) {
    return fmt::format("{} ranks are more than the {} of one machine", group.size(),
                       PeerMemory::kMostRanks);
  }
  cuda::RequireDevice(device.index);
  cudaDeviceProp properties{};
  Check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  Place own;
  gethostname(own.machine.data(), own.machine.size() - 1);
  std::memcpy(own.gpu.data(), properties.uuid.bytes, own.gpu.size());
  own.process = getpid();
  const std::vector<Place> places = GatherBytes(group, own);
  struct Answer {
    std::int32_t rank = 0;
    Reach reach = Reach::kReaches;
  } answer;
  for (int r = 0; r < group.size() && answer.reach == Reach::kReaches; ++r) {
    if (r == group.rank()) continue;
    answer = {r, ReachOf(own, places[static_cast<std::size_t>(r)], device.index)};
  }
  const std::vector<Answer> answers = GatherBytes(group, answer);
  for (int r = 0; r < group.size(); ++r) {
    const Answer& a = answers[static_cast<std::size_t>(r)];
    if (a.reach == Reach::kReaches) continue;
    return fmt::format("for rank {} rank {} {}", r, a.rank, TextOf(a.reach));
  }
  return WhyTrialFails(group, device);
}

// Memory of every rank that was taken from the driver at once, where this process sees it.
struct Segment {
  std::size_t bytes = 0;
  std::vector<std::byte*> of_rank;
};

struct PeerMemory::State {
  State(Communicator& ranks, Device where)
      : group(ranks),
        device(where),
        blocks({[this](std::size_t bytes) { return Take(bytes); }, [](void*) {}}) {}
  void* Take(std::size_t bytes);
  // The segment of an address of this rank's, and how far it is from the beginning.
  std::pair<std::size_t, std::size_t> Find(const void* own) const;

  Communicator& group;
  const Device device;
  const int exceptions = std::uncaught_exceptions();
  std::vector<Segment> segments;
  BlockCache blocks;  // after what it calls
  AllocatorStats stats;
};

namespace {

// What a rank could not do for the others, told to all of them.
struct Step {
  enum class Kind : std::int32_t { kDone, kTake, kShare, kOpen };
  Kind kind = Kind::kDone;
  cudaError_t status = cudaSuccess;
  std::int32_t other = 0;  // whose memory could not be opened
};

// The same on every rank.
void ThrowWhereOneFailed(const std::vector<Step>& steps, std::size_t bytes) {
  for (std::size_t r = 0; r < steps.size(); ++r) {
    const Step& s = steps[r];
    const char* why = cudaGetErrorString(s.status);
    switch (s.kind) {
      case Step::Kind::kDone: continue;
      case Step::Kind::kTake:
        if (s.status == cudaErrorMemoryAllocation) {
          CISTRON_THROW(kOutOfMemory,
                        "memory: the GPU of rank {} has no {} MiB for other ranks: {}", r,
                        bytes >> 20, why);
        }
        CISTRON_THROW(kInternal, "memory: the GPU of rank {} failed: {}", r, why);
      case Step::Kind::kShare:
        CISTRON_THROW(kUnsupported, "memory: rank {} cannot share memory of its GPU: {}", r, why);
      case Step::Kind::kOpen:
        CISTRON_THROW(kUnsupported, "memory: rank {} cannot open memory of rank {}'s GPU: {}", r,
                      s.other, why);
    }
  }
}

}  // namespace

void* PeerMemory::State::Take(std::size_t bytes) {
  void* own = nullptr;
  cudaError_t status = cudaSetDevice(device.index);
  if (status == cudaSuccess) status = cudaMalloc(&own, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    cuda::TrimDeviceMemory(device.index);
    status = cudaMalloc(&own, bytes);
  }
  struct Offer {
    cudaIpcMemHandle_t handle{};
    Step step;
  } offer;
  if (status == cudaSuccess) status = cudaMemset(own, 0xff, bytes);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status != cudaSuccess) {
    offer.step = {Step::Kind::kTake, status};
  } else if (status = cudaIpcGetMemHandle(&offer.handle, own); status != cudaSuccess) {
    offer.step = {Step::Kind::kShare, status};
  }
  std::vector<Step> steps;
  const std::vector<Offer> offers = GatherBytes(group, offer);
  for (const Offer& o : offers) steps.push_back(o.step);
  Segment segment{bytes, {}};
  const auto give_back = [&] {
    cudaGetLastError();
    for (std::size_t r = 0; r < segment.of_rank.size(); ++r) {
      if (static_cast<int>(r) != group.rank() && segment.of_rank[r] != nullptr) {
        cudaIpcCloseMemHandle(segment.of_rank[r]);
      }
    }
    group.Barrier();  // before it is freed it is closed everywhere
    if (own != nullptr) cudaFree(own);
  };
  const auto all_done = [&] {
    return std::all_of(steps.begin(), steps.end(),
                       [](const Step& s) { return s.kind == Step::Kind::kDone; });
  };
  if (all_done()) {
    Step opened;
    for (int r = 0; r < group.size() && opened.kind == Step::Kind::kDone; ++r) {
      void* there = own;
      if (r != group.rank()) {
        status = cudaIpcOpenMemHandle(&there, offers[static_cast<std::size_t>(r)].handle,
                                      cudaIpcMemLazyEnablePeerAccess);
        if (status != cudaSuccess) {
          there = nullptr;
          opened = {Step::Kind::kOpen, status, r};
        }
      }
      segment.of_rank.push_back(static_cast<std::byte*>(there));
    }
    steps = GatherBytes(group, opened);
  }
  if (!all_done()) {
    give_back();
    ThrowWhereOneFailed(steps, bytes);
  }
  segments.push_back(std::move(segment));
  return own;
}

std::pair<std::size_t, std::size_t> PeerMemory::State::Find(const void* own) const {
  const auto* address = static_cast<const std::byte*>(own);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const std::byte* begin = segments[s].of_rank[static_cast<std::size_t>(group.rank())];
    if (address >= begin && address < begin + segments[s].bytes) {
      return {s, static_cast<std::size_t>(address - begin)};
    }
  }
  CISTRON_THROW(kInternal, "memory: an address is not of the ranks' shared memory");
}

std::string WhyTrialFails(Communicator& group, Device device) {
  const auto ranks = static_cast<std::size_t>(group.size());
  const auto rank = static_cast<std::size_t>(group.rank());
  try {
    PeerMemory memory(group, device);
    const std::size_t bytes = ranks * sizeof(std::uint64_t);
    void* own = memory.Allocate(bytes);
    // Every rank writes its number, plus one, to its place with every rank.
    const std::uint64_t mine = rank + 1;
    struct Answer {
      cudaError_t status = cudaSuccess;
      std::int32_t other = 0;
      bool differs = false;
    } answer;
    for (std::size_t r = 0; r < ranks && answer.status == cudaSuccess; ++r) {
      const int other = static_cast<int>(r);
      answer = {cudaMemcpy(memory.At(other, own) + rank * sizeof(mine), &mine, sizeof(mine),
                           cudaMemcpyDefault),
                other};
    }
    if (answer.status == cudaSuccess) answer.status = cudaDeviceSynchronize();
    group.Barrier();
    std::vector<std::uint64_t> words(ranks);
    if (answer.status == cudaSuccess) {
      answer.status = cudaMemcpy(words.data(), own, bytes, cudaMemcpyDefault);
      for (std::size_t r = 0; r < ranks && !answer.differs; ++r) {
        answer = {answer.status, static_cast<std::int32_t>(r), words[r] != r + 1};
      }
    }
    cudaGetLastError();
    const std::vector<Answer> answers = GatherBytes(group, answer);
    memory.Deallocate(own, bytes);
    for (std::size_t r = 0; r < ranks; ++r) {
      if (answers[r].status == cudaSuccess) continue;
      return fmt::format("rank {} cannot write to memory of rank {}'s GPU: {}", r, answers[r].other,
                         cudaGetErrorString(answers[r].status));
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      if (!answers[r].differs) continue;
      return fmt::format("what rank {} writes to memory of rank {}'s GPU does not get there",
                         answers[r].other, r);
    }
    return {};
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kUnsupported) throw;
    return e.message();
  }
}

PeerMemory::PeerMemory(Communicator& group, Device device)
    : state_(std::make_unique<State>(group, device)) {}

// The driver wants memory closed everywhere before it is freed.
PeerMemory::~PeerMemory() {
  if (state_->segments.empty() || std::uncaught_exceptions() > state_->exceptions) return;
  try {
    cuda::Synchronize(state_->device);
    for (const Segment& segment : state_->segments) {
      for (int r = 0; r < state_->group.size(); ++r) {
        if (r == state_->group.rank()) continue;
        cudaIpcCloseMemHandle(segment.of_rank[static_cast<std::size_t>(r)]);
      }
    }
    state_->group.Barrier();
    for (const Segment& segment : state_->segments) {
      cudaFree(segment.of_rank[static_cast<std::size_t>(state_->group.rank())]);
    }
  } catch (const std::exception&) {  // of a run that ends
  }
}

void* PeerMemory::Allocate(std::size_t bytes) {
  void* block = state_->blocks.Allocate(bytes);
  state_->stats.live_bytes += static_cast<std::int64_t>(bytes);
  state_->stats.peak_bytes = std::max(state_->stats.peak_bytes, state_->stats.live_bytes);
  return block;
}

void PeerMemory::Deallocate(void* pointer, std::size_t bytes) noexcept {
  if (pointer == nullptr) return;
  state_->blocks.Free(pointer);
  state_->stats.live_bytes -= static_cast<std::int64_t>(bytes);
}

Device PeerMemory::device() const {
  return state_->device;
}

AllocatorStats PeerMemory::Stats() const {
  AllocatorStats stats = state_->stats;
  stats.cached_bytes = state_->blocks.segment_bytes() - state_->blocks.used_bytes();
  stats.allocations = state_->blocks.takes();
  return stats;
}

void PeerMemory::ResetPeak() {
  state_->stats.peak_bytes = state_->stats.live_bytes;
}

std::byte* PeerMemory::At(int rank, const void* own) const {
  const auto [segment, offset] = state_->Find(own);
  return state_->segments[segment].of_rank[static_cast<std::size_t>(rank)] + offset;
}

std::int64_t PeerMemory::Place(const void* own) const {
  const auto [segment, offset] = state_->Find(own);
  return static_cast<std::int64_t>(segment << 44 | offset);
}

}  // namespace cistron::comm::nccl
