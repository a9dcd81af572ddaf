// NCCL, the CUDA runtime and the CUDA backend as far as the communicator over NCCL uses them, in
// host memory: ranks are threads, what is queued on a stream is done at once. A test that links
// host_gpu.cc has these in place of the real ones, and needs no GPU.
#pragma once

#include <cstdint>

#include "cistron/tensor/device.h"

namespace cistron::comm::nccl {

// Where all ranks have their "device" memory.
inline constexpr Device kHostGpu{DeviceType::kCuda, 0};

// Of the events of this thread, a rank, those end that it has recorded so far, but for the last
// −more, or and the next `more`; until it is called all do. An operation has one before it and one
// behind it.
void LetEventsEnd(int more);
// How often NCCL was asked to add, over all ranks.
int NcclSums();
// Device memory of all ranks that is in use, of tensors and of PeerMemory.
std::int64_t LiveBytes();
// Memory of peers that is open.
int OpenedByPeers();
// What this thread's calls that take, share, open and write to memory of peers return; 0: success.
struct PeerFaults {
  int take = 0, share = 0, open = 0, write = 0;
  bool loses_writes = false;  // they succeed, and nothing is written
};
void SetPeerFaults(const PeerFaults& faults);

}  // namespace cistron::comm::nccl
