// The cases of every transport, with ranks that are threads, and with one rank.
#include <gtest/gtest.h>

#include <vector>

#include "cistron/comm/inproc.h"
#include "cistron/comm/self.h"
#include "cistron/comm/testing/collective_cases.h"

namespace cistron::comm {
namespace {

class Collectives : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(Collectives, Self) {
  const auto comm = MakeSelf();
  EXPECT_EQ(comm->rank(), 0);
  EXPECT_EQ(comm->size(), 1);
  EXPECT_EQ(comm->transport(), "self");
  GetParam().run(*comm);
}

TEST_P(Collectives, Inproc) {
  for (const bool checked : {true, false}) {
    for (const int ranks : checked ? std::vector{1, 2, 3, 4, 5} : std::vector{3}) {
      RunRanks(ranks,
               [&](Communicator& comm) {
                 EXPECT_EQ(comm.size(), ranks);
                 EXPECT_EQ(comm.transport(), "inproc");
                 EXPECT_EQ(comm.name(), "world");
                 GetParam().run(comm);
               },
               {.checked = checked});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(CollectiveCases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace cistron::comm
