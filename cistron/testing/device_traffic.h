// Work of a second stream of a GPU, of the kinds that a collective over several GPUs puts beside
// the main one: kernels of few blocks that stay for long, read two buffers, add and write a third,
// and signal through memory; copies within the device; copies from and to page-locked memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>

#include "cistron/tensor/device.h"

namespace cistron::testing {

class DeviceTraffic {
 public:
  // Starts; a thread of its own keeps the stream busy. Throws kUnsupported in a build without CUDA.
  explicit DeviceTraffic(Device device);
  ~DeviceTraffic();
  DeviceTraffic(const DeviceTraffic&) = delete;

  // Rounds of kernels and copies that have ended.
  std::int64_t rounds() const { return rounds_; }
  // Stops and waits. Throws what went wrong, also where the traffic's own sums are not what they
  // should be.
  void Stop();

 private:
  void Run(Device device);

  std::atomic<std::int64_t> rounds_{0};
  std::atomic<bool> stop_{false};
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace cistron::testing
