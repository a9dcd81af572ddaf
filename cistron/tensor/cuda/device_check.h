// Whether a GPU can be used, from what the driver says: plain C++, so that every answer is tested
// without one.
#pragma once

#include <string>
#include <string_view>

namespace cistron::cuda {

struct DeviceFacts {
  std::string error{};          // of the driver, when it shows no devices
  int runtime = 0, driver = 0;  // 13000 is 13.0; driver 0: there is none
  int count = 0;                // of devices
  int index = 0;                // the one that is asked for
  std::string name{};           // of it
  int major = 0, minor = 0;
};

// "13.0".
std::string VersionText(int version);
// "CUDA 13.0, driver for CUDA 12.4".
std::string DescribeVersions(int runtime, int driver);

// Whether kernels compiled for `architectures` ("80;90a") run on a compute capability: those with
// an `a` on theirs alone, others on later ones of the same generation too.
bool HasKernelsFor(std::string_view architectures, int major, int minor);

// What was found, what is needed and what to do; empty when the device can be used.
std::string DeviceRefusal(const DeviceFacts& facts, std::string_view architectures);

}  // namespace cistron::cuda
