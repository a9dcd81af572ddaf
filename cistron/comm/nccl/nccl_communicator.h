// The communicator over NCCL. Private to this folder.
#pragma once

#include <memory>

#include "cistron/comm/nccl/nccl.h"

namespace cistron::comm::nccl {

// Of all ranks of `control`; the device is this process's, and no other rank's.
std::unique_ptr<Communicator> MakeNcclCommunicator(Communicator& control, Device device,
                                                   const ConnectOptions& options);

}  // namespace cistron::comm::nccl
