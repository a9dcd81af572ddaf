// The cases of every transport, with ranks that are threads, and with one rank.
#include <gtest/gtest.h>

#include <string>
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

class Heard final : public Observer {
 public:
  void Begin(std::string_view operation, std::string_view transport) override {
    text += std::string(operation) + " (" + std::string(transport) + ") ";
  }
  std::string text;
};

TEST(ObserverTest, HearsOfBlockingOperationsOfItsCommunicatorAlone) {
  RunRanks(2, [](Communicator& comm) {
    Heard heard;
    const auto before = comm.Split(0, comm.rank());
    comm.SetObserver(&heard);
    const auto after = comm.Split(0, comm.rank());
    heard.text.clear();  // splitting is an exchange of the communicator
    const Tensor t = Tensor::Zeros({2}, DType::kF32), both = Tensor::Zeros({4}, DType::kF32);
    const std::vector<std::int64_t> one = {1, 1};
    before->Barrier();
    after->Barrier();
    comm.AllGatherAsync(t, both).Wait();
    EXPECT_EQ(heard.text, "");
    comm.AllToAll(t, one, Tensor::Zeros({2}, DType::kF32), one);
    comm.AllReduce(t);
    comm.Barrier();
    EXPECT_EQ(heard.text, "all_to_all (inproc) all_reduce (inproc) barrier (inproc) ");
    comm.SetObserver(nullptr);
    comm.Barrier();
    EXPECT_EQ(heard.text, "all_to_all (inproc) all_reduce (inproc) barrier (inproc) ");
  });
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(CollectiveCases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace cistron::comm
