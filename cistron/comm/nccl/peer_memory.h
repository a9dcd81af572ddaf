// Memory of a GPU that the GPUs of other ranks of one machine read and write by themselves.
//
// Kernels write to the addresses that At gives for another rank as they write to their own memory
// (CUDA peer access over NVLink or PCIe; between processes CUDA IPC). Nothing here orders such
// writes: whoever makes them tells the other rank when they are there.
//
// It is an allocator, whose calls are collective: every rank of the group allocates and frees
// blocks of the same sizes in the same order, so that a block lies in the same place on each. Most
// calls only take such a block; one that needs more memory from the driver exchanges handles with
// the other ranks, over the host. New memory holds bytes of 0xff, NaN as a float of any width.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cistron/comm/communicator.h"

namespace cistron::comm::nccl {

// Empty where each rank's GPU reaches the memory of each other's, which has been tried; else why
// not, the same text on every rank. Collective. Throws kOutOfMemory on every rank where one has no
// memory for the trial.
std::string WhyNoPeers(Communicator& group, Device device);
// The trial alone, of ranks that the driver calls peers: every rank writes to every other's memory.
std::string WhyTrialFails(Communicator& group, Device device);

class PeerMemory final : public Allocator {
 public:
  // Ranks of a group, at most; more cannot be told to a kernel.
  static constexpr int kMostRanks = 16;

  // `group` moves host memory too and outlives this, as tensors of it must not. Only where
  // WhyNoPeers says nothing.
  PeerMemory(Communicator& group, Device device);
  // Collective, but where an exception is thrown: then memory that others may have open stays.
  ~PeerMemory() override;

  // Throws on every rank, with the same message, where memory cannot be taken (kOutOfMemory) or
  // shared (kUnsupported) on one.
  void* Allocate(std::size_t bytes) override;
  void Deallocate(void* pointer, std::size_t bytes) noexcept override;
  Device device() const override;
  AllocatorStats Stats() const override;
  void ResetPeak() override;

  // Where this process finds what lies with `rank` at the place that `own` has here.
  std::byte* At(int rank, const void* own) const;
  // A number for the place of `own`, the same on every rank whose calls were the same.
  std::int64_t Place(const void* own) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::comm::nccl
