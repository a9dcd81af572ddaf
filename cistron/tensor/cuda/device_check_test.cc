// What is said of machines that cannot be had here.
#include "cistron/tensor/cuda/device_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cistron::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

DeviceFacts H200() {
  return {.runtime = 13000, .driver = 13000, .count = 1, .name = "NVIDIA H200", .major = 9};
}

TEST(DeviceCheck, AUsableDevice) {
  EXPECT_EQ(DeviceRefusal(H200(), "90a"), "");
  DeviceFacts newer = H200();
  newer.driver = 14020;
  EXPECT_EQ(DeviceRefusal(newer, "80;90a;100a"), "");
}

TEST(DeviceCheck, NoGpu) {
  EXPECT_THAT(
      DeviceRefusal({.error = "no device is detected", .runtime = 13000, .driver = 13000}, "90a"),
      HasSubstr("no device is detected (CUDA 13.0, driver for CUDA 13.0)"));
  // The runtime calls a driver that is missing too old.
  EXPECT_THAT(
      DeviceRefusal({.error = "driver is insufficient", .runtime = 13000}, "90a"),
      AllOf(HasSubstr("no NVIDIA driver is loaded (CUDA 13.0, no driver)"),
            HasSubstr("needed is an NVIDIA driver for CUDA 13.0"), HasSubstr("device=cpu")));
  DeviceFacts none = H200();
  none.count = 0;
  EXPECT_THAT(DeviceRefusal(none, "90a"), HasSubstr("the driver shows none"));
  DeviceFacts second = H200();
  second.index = 1;
  EXPECT_THAT(DeviceRefusal(second, "90a"), HasSubstr("there is no cuda:1, the driver shows 1"));
}

TEST(DeviceCheck, OlderDriver) {
  EXPECT_THAT(
      DeviceRefusal({.error = "CUDA driver version is insufficient for CUDA runtime version",
                     .runtime = 13000,
                     .driver = 12040},
                    "90a"),
      AllOf(HasSubstr("it is for CUDA 12.4"), HasSubstr("needs one for CUDA 13.0")));
}

TEST(DeviceCheck, AnotherArchitecture) {
  DeviceFacts a100 = H200();
  a100.name = "NVIDIA A100";
  a100.major = 8;
  EXPECT_THAT(
      DeviceRefusal(a100, "90a"),
      AllOf(HasSubstr("NVIDIA A100 with compute capability 8.0"),
            HasSubstr("kernels for 90a alone"), HasSubstr("-DCISTRON_CUDA_ARCHITECTURES=\"80\"")));
  EXPECT_EQ(DeviceRefusal(a100, "80;90a"), "");
  DeviceFacts b200 = H200();
  b200.major = 10;
  EXPECT_THAT(DeviceRefusal(b200, "80;90a"), HasSubstr("ARCHITECTURES=\"100a\""));
  DeviceFacts v100 = H200();
  v100.major = 7;
  EXPECT_THAT(DeviceRefusal(v100, "80;90a"), HasSubstr("needed is 8.0 or newer"));
}

TEST(DeviceCheck, KernelsRunWithinTheirGeneration) {
  EXPECT_TRUE(HasKernelsFor("80", 8, 0));
  EXPECT_TRUE(HasKernelsFor("80", 8, 9));
  EXPECT_FALSE(HasKernelsFor("89", 8, 0));
  EXPECT_FALSE(HasKernelsFor("80", 9, 0));
  EXPECT_TRUE(HasKernelsFor("90a", 9, 0));
  EXPECT_FALSE(HasKernelsFor("100a", 10, 3));
  EXPECT_TRUE(HasKernelsFor("80;90a;100a;120a", 12, 0));
  EXPECT_FALSE(HasKernelsFor("", 9, 0));
}

}  // namespace
}  // namespace cistron::cuda
