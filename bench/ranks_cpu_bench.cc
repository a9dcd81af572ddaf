// The whole training step on CPU ranks (dp 1, ep = ranks) that share a shape's batch; one JSON
// line, from rank 0.
//
//   ranks_cpu_bench MODEL [RANKS [STEPS]]              ranks are threads, 1 unless told
//   mpirun -np N ranks_cpu_bench MODEL [RANKS [STEPS]] ranks are processes; RANKS is N
//
// MODEL: a shape of `cistron bench`, whose sequences the ranks divide among themselves. The ranks
// of a process have OMP_NUM_THREADS threads together. `tokens_per_s` is that of all ranks, `ms` the
// median step; `cpu_ms` the processor time of all ranks' processes in a step, on average: more than
// one process of as many threads takes is time that ranks spin, or compute what another one does.
#include <fmt/core.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/self.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/bench_step.h"

namespace cistron {
namespace {

struct Arguments {
  std::string model;
  std::int64_t ranks = 1, steps = 15;
};

void Run(const Arguments& a, comm::Communicator& ranks) {
  const std::int64_t n = ranks.size();
  CISTRON_CHECK(n == a.ranks, "ranks_cpu_bench: {} ranks were asked for, and {} were started",
                a.ranks, n);
  train::BenchShape shape = train::NamedBenchShape(a.model);
  CISTRON_CHECK(shape.batch % n == 0, "ranks_cpu_bench: {} has {} sequences for {} ranks", a.model,
                shape.batch, n);
  shape.batch /= n;
  const int threads = NumThreads();
  const parallel::Mesh mesh(ranks, 1, n, shape.model.num_local_experts);
  const train::BenchResult r =
      train::BenchTrainStep(ops::Context(), shape, {.steps = a.steps, .mesh = &mesh});
  // Threads of one process have its time alike; processes have their own.
  const Tensor cpu = Tensor::FromSpan<double>({1}, std::span(&r.cpu_ms, 1));
  if (ranks.transport() != "inproc") ranks.AllReduce(cpu, comm::ReduceOp::kSum);
  if (ranks.rank() != 0) return;
  fmt::print(
      "{{\"model\": \"{}\", \"transport\": \"{}\", \"ranks\": {}, \"threads_each\": {}, "
      "\"tokens_per_s\": {:.0f}, \"ms\": {:.1f}, \"fastest_ms\": {:.1f}, \"cpu_ms\": {:.1f}, "
      "\"loss\": {:.4f}}}\n",
      a.model, ranks.transport(), n, threads, static_cast<double>(n) * r.tokens_per_s, r.ms,
      r.fastest_ms, cpu.data<double>()[0], r.loss);
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: ranks_cpu_bench MODEL [RANKS [STEPS]]\n");
    return 2;
  }
  const Arguments a{.model = argv[1],
                    .ranks = argc > 2 ? std::atol(argv[2]) : 1,
                    .steps = argc > 3 ? std::atol(argv[3]) : 15};
  if (comm::mpi::IsBuilt() && comm::mpi::IsLaunched()) {
    return comm::mpi::RunRank([&](comm::Communicator& ranks) {
      Run(a, ranks);
      return 0;
    });
  }
  if (a.ranks == 1) {
    Run(a, *comm::MakeSelf());
    return 0;
  }
  comm::RunRanks(static_cast<int>(a.ranks), [&](comm::Communicator& ranks) { Run(a, ranks); });
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  try {
    return cistron::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
