#include "cistron/testing/cuda.h"

#include <cstdio>
#include <cstdlib>

#include "cistron/base/env.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::testing {
namespace {
bool in_use = false;
}  // namespace

void UseCuda() {
  if (!cuda::IsBuilt()) return;
  if (GetEnv("CISTRON_TEST_CUDA") == "0") {
    std::printf("[   cuda   ] CISTRON_TEST_CUDA=0: what runs on a GPU is not tested\n");
    return;
  }
  setenv("CUDA_LAUNCH_BLOCKING", "1", /*overwrite=*/1);
  const auto devices = cuda::Devices();
  if (devices.empty()) {
    std::printf("[   cuda   ] no GPU: what runs on one is not tested (%s)\n",
                cuda::Describe().c_str());
    return;
  }
  cuda::RequireDevice(0);
  SetHostMemory(cuda::PinnedHostMemory());
  in_use = true;
  std::printf("[   cuda   ] %s, compute capability %d.%d\n", devices[0].name.c_str(),
              devices[0].major, devices[0].minor);
}

bool HasCuda() {
  return in_use;
}

ops::Context CudaContext() {
  return ops::Context(Device{DeviceType::kCuda, 0}).WithAllocator(CpuAllocator());
}

}  // namespace cistron::testing
