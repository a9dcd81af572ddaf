// What builds without Open MPI and NCCL say; compiled everywhere.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cistron/base/error.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/comm/self.h"

namespace cistron::comm {
namespace {

TEST(NoMpi, SaysWhatIsMissing) {
  EXPECT_FALSE(mpi::IsBuilt());
  EXPECT_EQ(mpi::Describe(), "not in this build");
  try {
    mpi::RunRank([](Communicator&) { return 0; });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(e.message(), ::testing::HasSubstr("libopenmpi-dev"));
  }
}

TEST(NoMpi, SeesALauncherNonetheless) {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    EXPECT_FALSE(mpi::IsLaunched());
    setenv(variable, "1", 1);
    EXPECT_TRUE(mpi::IsLaunched()) << variable;
    unsetenv(variable);
  }
}

TEST(NoNccl, SaysWhatToUse) {
  EXPECT_FALSE(nccl::IsBuilt());
  EXPECT_EQ(nccl::Describe(), "not in this build");
  const auto self = MakeSelf();
  try {
    nccl::Connect(*self, {DeviceType::kCuda, 1});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(e.message(), ::testing::HasSubstr("cuda:1"));
  }
}

}  // namespace
}  // namespace cistron::comm
