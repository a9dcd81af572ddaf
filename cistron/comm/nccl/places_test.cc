// Which GPU is a rank's, and what is refused, without a GPU.
#include "cistron/comm/nccl/places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::comm::nccl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::Throws;

Place On(std::string_view machine, int visible, char gpu = 0, int index = 0) {
  Place place;
  machine.copy(place.machine.data(), machine.size());
  place.gpu[15] = gpu;
  place.visible = visible;
  place.index = index;
  return place;
}

TEST(Places, ARankHasTheGpuOfItsNumberOnItsMachine) {
  const std::vector<Place> two_machines = {On("a", 2), On("b", 4), On("a", 2), On("b", 4)};
  const std::vector<Place> shown_one = {On("a", 1), On("a", 1)};
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(DeviceIndex(two_machines, rank), rank / 2) << rank;
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(DeviceIndex(shown_one, rank), 0) << rank;
}

TEST(Places, MoreRanksThanGpusAreRefusedOnEveryRank) {
  const std::vector<Place> all = {On("a", 2), On("b", 2), On("b", 2), On("b", 2)};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(
        [&] { DeviceIndex(all, rank); },
        Throws<Error>(AllOf(Property(&Error::code, ErrorCode::kUnsupported),
                            Property(&Error::message, HasSubstr("b has 2 GPUs for its 3 ranks")))));
  }
  const std::vector<Place> none = {On("a", 0), On("a", 0)};
  EXPECT_THROW(DeviceIndex(none, 0), Error);
}

TEST(Places, TwoRanksOnOneGpuAreNamed) {
  EXPECT_NO_THROW(CheckOneRankAGpu(std::vector<Place>{On("a", 2, 1), On("a", 2, 2, 1)}));
  const std::vector<Place> shared = {On("a", 2, 1), On("a", 2, 2, 1), On("a", 1, 1)};
  EXPECT_THAT([&] { CheckOneRankAGpu(shared); },
              Throws<Error>(AllOf(
                  Property(&Error::code, ErrorCode::kBadInput),
                  Property(&Error::message, HasSubstr("ranks 0 and 2 are both on one GPU of a")))));
}

}  // namespace
}  // namespace cistron::comm::nccl
