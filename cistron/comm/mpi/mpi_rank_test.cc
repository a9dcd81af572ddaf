// What one rank does in the tests of mpi_test.cc: mpirun … mpi_rank_test WHAT LIMIT_MS
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "cistron/base/error.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/testing/collective_cases.h"

namespace cistron::comm {
namespace {

Communicator* g_world = nullptr;  // tests of GoogleTest take no arguments

class Collectives : public ::testing::TestWithParam<CollectiveCase> {};

TEST_P(Collectives, Mpi) {
  EXPECT_EQ(g_world->transport(), "mpi");
  GetParam().run(*g_world);
}

INSTANTIATE_TEST_SUITE_P(, Collectives, ::testing::ValuesIn(CollectiveCases()),
                         [](const auto& test) { return test.param.name; });

int RunCases(Communicator& world) {
  g_world = &world;
  // An exception ends all ranks; caught here, it would leave the others waiting.
  GTEST_FLAG_SET(catch_exceptions, false);
  return RUN_ALL_TESTS();
}

Tensor Ones(std::int64_t n) {
  return Tensor::Zeros({n}, DType::kF32);
}

int ReduceForever(Communicator& world) {
  for (;;) world.AllReduce(Ones(50'000));
}

int Mismatch(Communicator& world) {
  world.Barrier();
  world.AllReduce(Ones(8 + (world.rank() == 1 ? 1 : 0)));
  return 0;
}

// While the others wait for it, or compute without end.
int Throw(Communicator& world) {
  world.Barrier();
  if (world.rank() == 1) throw std::runtime_error("the disk is on fire");
  if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::hours(1));
  world.Barrier();
  return 0;
}

int ThrowEverywhere(Communicator& world) {
  CISTRON_THROW(kInvalidArgument, "no such preset: {}", "L9");
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: mpi_rank_test WHAT LIMIT_MS\n");
    return 2;
  }
  const std::string what = argv[1];
  mpi::RunOptions options;
  options.communicator.limit = std::chrono::milliseconds(std::stol(argv[2]));
  options.communicator.checked = what == "checked" || what == "mismatch";
  if (what == "pieces") options.largest_message = 30'001;
  options.status_of = [](const std::exception& e) {
    return dynamic_cast<const Error*>(&e) != nullptr ? 3 : 4;
  };
  // A rank that never comes to where MPI starts.
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (what == "stops_first") {
    options.start_limit = options.communicator.limit;
    if (rank != nullptr && std::string_view(rank) == "0") raise(SIGSTOP);
  }
  return mpi::RunRank(
      [&](Communicator& world) {
        // One write: lines of ranks do not mix.
        const std::string line = fmt::format("pid {} of rank {}\n", getpid(), world.rank());
        std::fwrite(line.data(), 1, line.size(), stdout);
        std::fflush(stdout);
        if (what == "forever") return ReduceForever(world);
        if (what == "mismatch" || what == "unchecked") return Mismatch(world);
        if (what == "throw") return Throw(world);
        if (what == "throw_everywhere") return ThrowEverywhere(world);
        return RunCases(world);
      },
      options);
}

}  // namespace
}  // namespace cistron::comm

int main(int argc, char** argv) {
  return cistron::comm::Main(argc, argv);
}
