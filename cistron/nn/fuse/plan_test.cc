// What a plan depends on besides the ops: the device.
#include "cistron/nn/fuse/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"

namespace cistron::nn::fuse {
namespace {

using ::testing::HasSubstr;

// On a GPU the experts fuse in high precision; in a recipe they do not yet, and the plan says so.
TEST(Plan, ChangesWithTheDevice) {
  const GroupedLinear first(
      {.num_groups = 2, .in_features = 8, .out_features = 16, .out_parts = 2, .name = "first"});
  const ScaledSwiGLU act;
  const GroupedLinear second(
      {.num_groups = 2, .in_features = 8, .out_features = 8, .name = "second"});
  const BasicOp* const ops[] = {&first, &act, &second};
  const auto plan = [&](DeviceType device, const quant::Recipe& recipe) {
    return MakePlan(ops, {.device = {device, 0},
                          .dtype = DType::kBF16,
                          .training = true,
                          .recipes = {recipe, recipe, recipe}});
  };
  const quant::Recipe bf16 = quant::BF16{}, mxfp8 = quant::MXFP8BlockScaling{};
  EXPECT_EQ(plan(DeviceType::kCpu, bf16).forward.size(), 1u);
  EXPECT_EQ(plan(DeviceType::kCuda, bf16).forward.size(), 1u);
  EXPECT_EQ(plan(DeviceType::kCpu, mxfp8).forward.size(), 1u);
  const Plan unfused = plan(DeviceType::kCuda, mxfp8);
  EXPECT_EQ(unfused.forward.size(), 3u);
  EXPECT_FALSE(unfused.key == plan(DeviceType::kCpu, mxfp8).key);
  EXPECT_THAT(Describe(unfused, ops),
              HasSubstr("first: this device has no kernel for MXFP8BlockScaling; remedy: "
                        "device=cpu, or precision=bf16"));
}

}  // namespace
}  // namespace cistron::nn::fuse
