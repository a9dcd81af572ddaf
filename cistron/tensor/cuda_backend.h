// The CUDA runtime behind functions that need no CUDA header. A build without CUDA has stand-ins
// (cuda/cuda_backend_stub.cc) that know no device and throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cistron/tensor/allocator.h"
#include "cistron/tensor/device.h"

namespace cistron::cuda {

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0, l2_bytes = 0;
};

// Whether this build has the backend.
bool IsBuilt();
// Devices that the driver shows; empty without a driver.
std::vector<DeviceInfo> Devices();
// "CUDA 13.0, driver 13.0", or why there is none.
std::string Describe();
// 10 · major + minor of the device that was required last; 0 before.
int ComputeCapability();
// Throws kUnsupported, saying what was found and what is needed, unless device `index` can be used;
// makes it the calling thread's, and where page-locked memory is made.
void RequireDevice(int index);

// Memory in the order of MainStream: a block that is freed may be given out again at once, because
// whoever gets it works on the same stream.
Allocator& DeviceAllocator(int index);
// The stream on which all work of a device is ordered.
Stream MainStream(int index);

// Page-locked memory, which the devices read and write by themselves and copy at full speed.
HostMemory PinnedHostMemory();

// Copies in the order of the device's main stream; the host may use its side when this returns. At
// least one side is on a CUDA device.
void Copy(void* to, Device to_device, const void* from, Device from_device, std::size_t bytes);
// Sets every byte, in the order of the main stream.
void FillBytes(void* data, Device device, unsigned char value, std::size_t bytes);
// A moment in the order of a device's main stream.
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;
  void Record();
  // Until what was queued before Record is done; throws what went wrong with it.
  void Wait() const;
  // Milliseconds from `earlier` to this, both recorded; waits for this one.
  double MillisecondsSince(const Event& earlier) const;

 private:
  Device device_;
  void* handle_ = nullptr;
};

// Waits for all work of the device; throws what went wrong on it.
void Synchronize(Device device);

}  // namespace cistron::cuda
