// When the kernels, copies and fills of a GPU ran, as CUPTI notes it: how busy the device was.
// CUPTI is loaded at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/tensor/device.h"

namespace cistron::cuda {

// From the beginning of the first kernel (or copy, or fill) to the end of the last.
struct DeviceTime {
  double span_ms = 0;
  double busy_ms = 0;  // some kernel ran; the rest is gaps
  std::int64_t kernels = 0;
  double gap_share() const { return span_ms > 0 ? 1 - busy_ms / span_ms : 0; }
};

// One at a time in a process, and to be made before the process uses the device. Noting takes the
// device some time a kernel, all of which counts as gaps: little so, two microseconds a kernel
// where the trace begins later (seen with CUDA 13.0 on an H200).
class KernelTrace {
 public:
  // Why there can be none: a build without CUDA, or CUPTI is not here. Empty where it can.
  static std::string WhyNot();

  // What is queued from now on is noted. Throws kUnsupported with WhyNot().
  KernelTrace();
  ~KernelTrace();
  KernelTrace(const KernelTrace&) = delete;

  // Waits for the device; only what is queued from now on counts.
  void Restart(Device device);
  // Waits for the device; what ran since Restart.
  DeviceTime Read(Device device);

 private:
  bool on_ = false;
  std::uint64_t begin_ns_ = 0;
};

// One moment of activity.
struct Activity {
  std::uint64_t begin_ns, end_ns;
};
// In any order; they may overlap.
DeviceTime TimeOf(std::vector<Activity> activities);

}  // namespace cistron::cuda
