// A build without CUDA, or without the header of CUPTI.
#include "cistron/base/error.h"
#include "cistron/tensor/kernel_trace.h"

namespace cistron::cuda {

std::string KernelTrace::WhyNot() {
  return "this build has no CUPTI: configure with `cmake --preset cuda` where the CUDA toolkit has "
         "cupti.h";
}
KernelTrace::KernelTrace() {
  CISTRON_THROW(kUnsupported, "kernel trace: {}", WhyNot());
}
KernelTrace::~KernelTrace() = default;
void KernelTrace::Restart(Device) {}
DeviceTime KernelTrace::Read(Device) {
  return {};
}

}  // namespace cistron::cuda
