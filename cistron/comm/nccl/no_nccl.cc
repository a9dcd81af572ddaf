// A build without NCCL.
#include "cistron/base/error.h"
#include "cistron/comm/nccl/nccl.h"

namespace cistron::comm::nccl {

bool IsBuilt() {
  return false;
}
std::string Describe() {
  return "not in this build";
}
std::unique_ptr<Communicator> Connect(Communicator&, Device device) {
  CISTRON_THROW(
      kUnsupported,
      "nccl: this build moves no tensors between GPUs ({} was asked for). The transport is "
      "not written yet; use device=cpu for several ranks, or one rank for a GPU",
      ToString(device));
}

}  // namespace cistron::comm::nccl
