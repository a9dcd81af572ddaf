// The whole training step on ranks with a GPU each; one JSON line, from rank 0.
//
//   mpirun -np N rank_step_bench MODEL ROWS DP EP SHARD STATES [STEPS]
//
// MODEL: a shape of `cistron bench`; ROWS: sequences of each rank; SHARD: none or full; STATES:
// fp32 or bf16. `tokens_per_s` is one GPU's. Without mpirun it measures one GPU (DP = EP = 1).
#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/bench_step.h"

namespace cistron {
namespace {

struct Arguments {
  std::string model;
  std::int64_t rows = 1, dp = 1, ep = 1, steps = 7;
  std::string shard, states;
};

int Run(const Arguments& a, comm::Communicator& control) {
  const Device device = comm::nccl::DeviceOfRank(control);
  const auto ranks = comm::nccl::Connect(control, device);
  train::BenchShape shape = train::NamedBenchShape(a.model);
  shape.batch = a.rows;
  const parallel::Mesh mesh(*ranks, a.dp, a.ep, shape.model.num_local_experts);
  const train::BenchResult r = train::BenchTrainStep(
      ops::Context(device), shape,
      {.precision = train::Precision::kBf16,
       .steps = a.steps,
       .states = a.states == "bf16" ? train::OptimStates::kBF16 : train::OptimStates::kF32,
       .mesh = &mesh,
       .sharded = a.shard == "full"});
  if (ranks->rank() != 0) return 0;
  fmt::print(
      "{{\"model\": \"{}\", \"rows\": {}, \"dp\": {}, \"ep\": {}, \"shard\": \"{}\", \"states\": "
      "\"{}\", \"tokens_per_s\": {:.0f}, \"ms\": {:.1f}, \"fastest_ms\": {:.1f}, "
      "\"device_peak_mib\": {}, \"allocations\": {}, \"loss\": {:.4f}}}\n",
      a.model, a.rows, a.dp, a.ep, a.shard, a.states, r.tokens_per_s, r.ms, r.fastest_ms,
      r.device_peak_mib, r.allocations, r.loss);
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: rank_step_bench MODEL ROWS DP EP SHARD STATES [STEPS]\n");
    return 2;
  }
  try {
    const cistron::Arguments a{.model = argv[1],
                               .rows = std::stol(argv[2]),
                               .dp = std::stol(argv[3]),
                               .ep = std::stol(argv[4]),
                               .steps = argc > 7 ? std::stol(argv[7]) : 7,
                               .shard = argv[5],
                               .states = argv[6]};
    return cistron::comm::mpi::RunRank(
        [&](cistron::comm::Communicator& control) { return cistron::Run(a, control); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
