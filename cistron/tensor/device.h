// Where a tensor lives and in which order work on it runs.
#pragma once

#include <string>

namespace cistron {

enum class DeviceType { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0".
std::string ToString(Device device);

// An ordered queue of work on a device. On the CPU work runs at once in the calling thread, so its
// only stream is the default one; a CUDA stream keeps its handle here.
struct Stream {
  Device device;
  void* handle = nullptr;
};

}  // namespace cistron
