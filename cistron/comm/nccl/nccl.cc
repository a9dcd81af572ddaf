#include "cistron/comm/nccl/nccl.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "cistron/comm/nccl/library.h"
#include "cistron/comm/nccl/nccl_communicator.h"
#include "cistron/comm/nccl/places.h"
#include "cistron/tensor/cuda/check.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::comm::nccl {
namespace {

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
  const int index = DeviceIndex(all, control.rank());
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
  CheckOneRankAGpu(all);
  ConnectOptions complete = options;
  if (!complete.on_failure) complete.on_failure = EndProcess;
  return MakeNcclCommunicator(control, device, complete);
}

}  // namespace cistron::comm::nccl
