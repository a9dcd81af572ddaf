// A build without NCCL.
#include "cistron/base/error.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/comm/nccl/peer_memory.h"

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

void Watch(Communicator&, const std::string&, const std::function<void()>& queue,
           const std::function<std::string()>&) {
  queue();
}

std::string WhyNoPeers(Communicator&, Device) {
  return "this build has no NCCL";
}
struct PeerMemory::State {};
PeerMemory::PeerMemory(Communicator&, Device device) {
  Refuse(ToString(device));
}
PeerMemory::~PeerMemory() = default;
void* PeerMemory::Allocate(std::size_t) {
  return nullptr;
}
void PeerMemory::Deallocate(void*, std::size_t) noexcept {}
Device PeerMemory::device() const {
  return {};
}
AllocatorStats PeerMemory::Stats() const {
  return {};
}
void PeerMemory::ResetPeak() {}
std::byte* PeerMemory::At(int, const void*) const {
  return nullptr;
}
std::int64_t PeerMemory::Place(const void*) const {
  return 0;
}

}  // namespace cistron::comm::nccl
