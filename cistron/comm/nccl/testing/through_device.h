// Host tensors in, host tensors out, device tensors in between: the cases of every transport on a
// transport of GPUs.
#pragma once

#include <memory>

#include "cistron/comm/communicator.h"
#include "cistron/tensor/device.h"

namespace cistron::comm::nccl {

// Copies the tensors of each operation to `device`, hands them to `ranks` and copies all of the
// outputs back, what lies beyond the counts too. `ranks` must outlive the result.
std::unique_ptr<Communicator> ThroughDevice(Communicator& ranks, Device device);

}  // namespace cistron::comm::nccl
