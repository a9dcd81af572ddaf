// NCCL, the CUDA runtime and the CUDA backend as far as the communicator over NCCL uses them, in
// host memory: ranks are threads, what is queued on a stream is done at once. A test that links
// host_gpu.cc has these in place of the real ones, and needs no GPU.
#pragma once

#include "cistron/tensor/device.h"

namespace cistron::comm::nccl {

// Where all ranks have their "device" memory.
inline constexpr Device kHostGpu{DeviceType::kCuda, 0};

// While it is false no event ends.
void LetEventsEnd(bool end);
// While it is false, freeing an event waits, as behind another thread's wait in the driver.
void LetEventsBeFreed(bool freed);
// How often NCCL was asked to add, over all ranks.
int NcclSums();

}  // namespace cistron::comm::nccl
