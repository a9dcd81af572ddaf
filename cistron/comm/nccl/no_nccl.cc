// A build without NCCL.
#include "cistron/base/error.h"
#include "cistron/comm/nccl/nccl.h"

namespace cistron::comm::nccl {
namespace {

[[noreturn]] void Refuse(const std::string& device) {
  CISTRON_THROW(kUnsupported,
                "nccl: this build moves no tensors between GPUs ({} was asked for). Install NCCL's "
                "header (Debian: libnccl-dev, or scripts/setup_cuda.sh), configure with "
                "-DCISTRON_CUDA=ON and build again; "
                "or use device=cpu for several ranks, or one rank for a GPU",
                device);
}

}  // namespace

bool IsBuilt() {
  return false;
}
std::string Describe() {
  return "not in this build";
}
Device DeviceOfRank(Communicator& control) {
  Refuse(fmt::format("one for each of {} ranks", control.size()));
}
std::unique_ptr<Communicator> Connect(Communicator&, Device device, const ConnectOptions&) {
  Refuse(ToString(device));
}

}  // namespace cistron::comm::nccl
