#include "cistron/comm/nccl/nccl.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cistron/comm/nccl/library.h"
#include "cistron/comm/nccl/nccl_communicator.h"
#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::comm::nccl {
namespace {

// Where a rank runs. Plain bytes: it travels as it is.
struct Place {
  std::array<char, 256> machine{};
  std::array<char, 16> gpu{};  // the UUID, which no other GPU has
  std::int32_t index = 0;
  std::int32_t visible = 0;  // GPUs that the rank sees
};

Place Here() {
  Place place;
  gethostname(place.machine.data(), place.machine.size() - 1);
  return place;
}

// Of all ranks.
std::vector<Place> Gather(Communicator& control, Place own) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Place));
  std::vector<Place> all(static_cast<std::size_t>(control.size()));
  control.AllGather(Tensor::Borrow(&own, {kBytes}, DType::kU8),
                    Tensor::Borrow(all.data(), {control.size() * kBytes}, DType::kU8));
  return all;
}

std::string VersionText(int version) {
  return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void EndProcess(const Error& error) {
  std::fprintf(stderr, "error: %s\n", error.message().c_str());
  std::fflush(stderr);
  _exit(1);  // destructors would wait for the GPU
}

}  // namespace

bool IsBuilt() {
  return true;
}

std::string Describe() {
  try {
    int version = 0;
    Check(Nccl().GetVersion(&version), "ncclGetVersion");
    return VersionText(version);
  } catch (const Error& error) {
    return error.message();
  }
}

Device DeviceOfRank(Communicator& control) {
  Place own = Here();
  own.visible = static_cast<std::int32_t>(cuda::Devices().size());
  const std::vector<Place> all = Gather(control, own);
  int before = 0;
  for (int r = 0; r < control.rank(); ++r) {
    if (all[static_cast<std::size_t>(r)].machine == own.machine) ++before;
  }
  // Launchers may show every rank its own GPU alone.
  const int index = own.visible == 1 ? 0 : before;
  for (int r = 0; r < control.size(); ++r) {
    const Place& place = all[static_cast<std::size_t>(r)];
    int neighbours = 0;
    for (const Place& other : all) neighbours += other.machine == place.machine ? 1 : 0;
    // Equal numbers on every rank: all throw.
    if (place.visible == 1 || neighbours <= place.visible) continue;
    CISTRON_THROW(kUnsupported,
                  "nccl: {} has {} GPUs for its {} ranks; start at most one rank a GPU",
                  place.machine.data(), place.visible, neighbours);
  }
  return {DeviceType::kCuda, index};
}

std::unique_ptr<Communicator> Connect(Communicator& control, Device device,
                                      const ConnectOptions& options) {
  CISTRON_CHECK(device.type == DeviceType::kCuda, "nccl: {} is no GPU", ToString(device));
  Nccl();
  cuda::RequireDevice(device.index);
  cudaDeviceProp properties{};
  cuda::Check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  Place own = Here();
  own.index = device.index;
  std::memcpy(own.gpu.data(), properties.uuid.bytes, own.gpu.size());
  const std::vector<Place> all = Gather(control, own);
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      if (all[a].gpu != all[b].gpu) continue;
      CISTRON_THROW(kBadInput,
                    "nccl: ranks {} and {} are both on one GPU of {} (cuda:{} and cuda:{}); NCCL "
                    "needs a GPU for each rank: start fewer ranks, or show each its own",
                    b, a, all[a].machine.data(), all[b].index, all[a].index);
    }
  }
  ConnectOptions complete = options;
  if (!complete.on_failure) complete.on_failure = EndProcess;
  return MakeNcclCommunicator(control, device, complete);
}

}  // namespace cistron::comm::nccl
