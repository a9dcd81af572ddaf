// A build without CUDA.
#include "cistron/base/error.h"
#include "cistron/testing/device_traffic.h"

namespace cistron::testing {

DeviceTraffic::DeviceTraffic(Device) {
  CISTRON_THROW(kUnsupported, "traffic: this build has no CUDA backend");
}
DeviceTraffic::~DeviceTraffic() = default;
void DeviceTraffic::Stop() {}
void DeviceTraffic::Run(Device) {}

}  // namespace cistron::testing
