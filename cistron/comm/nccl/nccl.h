// Ranks with a GPU each: NCCL moves device memory. No build has it yet; the place where it will be.
#pragma once

#include <memory>
#include <string>

#include "cistron/comm/communicator.h"
#include "cistron/tensor/device.h"

namespace cistron::comm::nccl {

// Whether this build has the transport.
bool IsBuilt();
// Its version, or "not in this build".
std::string Describe();

// The communicator of the ranks of `control`, each with its own GPU; ids travel over `control`,
// which moves host memory and outlives the result. Collective. Throws kUnsupported where the
// transport is not built.
std::unique_ptr<Communicator> Connect(Communicator& control, Device device);

}  // namespace cistron::comm::nccl
