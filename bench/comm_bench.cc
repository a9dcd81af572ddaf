// Collectives of the host transports: time and bytes a second by size. One JSON line a case, from
// rank 0.
//
//   comm_bench [--ranks N] [--checked 1]          ranks are threads, 2 unless told
//   mpirun -np N comm_bench [--checked 1]         ranks are processes
//
// `bus_gb_per_s` counts what a rank must send, as the tests of NCCL do: 2(n − 1)/n of the bytes of
// an all-reduce, (n − 1)/n of the whole of the others. Times are the slowest rank's, median of the
// repeats; `cpu_microseconds` is the processor time of its thread.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "bench/alternate.h"
#include "cistron/comm/communicator.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/mpi/mpi.h"

namespace cistron {
namespace {

// `whole` bytes: of the tensor, or of all parts of a gather, scatter or exchange together.
void Bench(comm::Communicator& comm, const std::string& op, std::int64_t whole, double share,
           const std::function<void()>& function) {
  const std::int64_t repeats = std::clamp<std::int64_t>((std::int64_t{1} << 29) / whole, 7, 501);
  const Tensor times = Tensor::Empty({2, repeats}, DType::kF64);  // wall, processor
  for (std::int64_t i = -2; i < repeats; ++i) {                   // the first two warm up
    comm.Barrier();
    const double wall = bench::Now(CLOCK_MONOTONIC), cpu = bench::Now(CLOCK_THREAD_CPUTIME_ID);
    function();
    if (i < 0) continue;
    times.data<double>()[i] = bench::Now(CLOCK_MONOTONIC) - wall;
    times.data<double>()[repeats + i] = bench::Now(CLOCK_THREAD_CPUTIME_ID) - cpu;
  }
  comm.AllReduce(times, comm::ReduceOp::kMax);
  if (comm.rank() != 0) return;
  const auto median = [&](std::int64_t row) {
    const std::span<double> t = times.Select(row).span<double>();
    std::nth_element(t.begin(), t.begin() + repeats / 2, t.end());
    return t[static_cast<std::size_t>(repeats / 2)];
  };
  fmt::print(
      "{{\"op\": \"{}\", \"transport\": \"{}\", \"ranks\": {}, \"bytes\": {}, \"microseconds\": "
      "{:.1f}, \"cpu_microseconds\": {:.1f}, \"bus_gb_per_s\": {:.2f}}}\n",
      op, comm.transport(), comm.size(), whole, median(0) * 1e6, median(1) * 1e6,
      share * static_cast<double>(whole) * 1e-9 / median(0));
  std::fflush(stdout);
}

int Run(comm::Communicator& comm) {
  const std::int64_t n = comm.size();
  const double share = static_cast<double>(n - 1) / static_cast<double>(n);
  Bench(comm, "barrier", 1, 0, [&] { comm.Barrier(); });
  for (const std::int64_t bytes :
       {std::int64_t{1} << 10, std::int64_t{1} << 14, std::int64_t{1} << 18, std::int64_t{1} << 22,
        std::int64_t{1} << 26}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor t = Tensor::Zeros({bytes / static_cast<std::int64_t>(SizeOf(dtype))}, dtype);
      Bench(comm, fmt::format("all_reduce {}", Name(dtype)), bytes, 2 * share,
            [&] { comm.AllReduce(t); });
    }
    const std::int64_t part = bytes / 4 / n;
    const Tensor whole = Tensor::Zeros({n, part}, DType::kF32),
                 own = Tensor::Zeros({part}, DType::kF32);
    Bench(comm, "reduce_scatter f32", whole.bytes(), share,
          [&] { comm.ReduceScatter(whole, own); });
    Bench(comm, "all_gather f32", whole.bytes(), share, [&] { comm.AllGather(own, whole); });
    const Tensor received = Tensor::Zeros({n, part}, DType::kF32);
    const std::vector<std::int64_t> rows(static_cast<std::size_t>(n), 1);
    Bench(comm, "all_to_all f32", whole.bytes(), share,
          [&] { comm.AllToAll(whole, rows, received, rows); });
  }
  return 0;
}

int Main(int argc, char** argv) {
  int ranks = 2;
  comm::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--ranks") == 0) ranks = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--checked") == 0) options.checked = std::atoi(argv[i + 1]) != 0;
  }
  if (comm::mpi::IsLaunched()) {
    comm::mpi::RunOptions run;
    run.communicator = options;
    return comm::mpi::RunRank(Run, run);
  }
  comm::RunRanks(ranks, Run, options);
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  try {
    return cistron::Main(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
