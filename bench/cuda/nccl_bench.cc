// Collectives of device memory over NCCL, one GPU a rank: time and bytes a second by size.
//
//   mpirun -np N nccl_bench
//
// `bus_gb_per_s` counts what a GPU must send, as the tests of NCCL do: 2(n − 1)/n of the bytes of
// an all-reduce, (n − 1)/n of the whole of the others. Times are between events of the main stream
// around as many operations as take some time, the slowest rank's, median of the repeats.
#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "bench/cuda/slowest_rank.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron {
namespace {

void Bench(comm::Communicator& comm, Device device, const std::string& op, std::int64_t whole,
           double share, const std::function<void()>& function) {
  const double ms = bench::SlowestRankMs(comm, device, function);
  if (comm.rank() != 0) return;
  fmt::print(
      "{{\"op\": \"{}\", \"transport\": \"{}\", \"ranks\": {}, \"mib\": {}, \"ms\": {:.4f}, "
      "\"bus_gb_per_s\": {:.1f}}}\n",
      op, comm.transport(), comm.size(), whole >> 20, ms,
      share * static_cast<double>(whole) * 1e-6 / ms);
  std::fflush(stdout);
}

void BenchSize(comm::Communicator& comm, comm::Communicator& adds_here, Device device,
               std::int64_t bytes) {
  const std::int64_t n = comm.size();
  const double share = static_cast<double>(n - 1) / static_cast<double>(n);
  Allocator& memory = cuda::DeviceAllocator(device.index);
  const std::int64_t part = bytes / n / 2;
  const Tensor whole = Tensor::Zeros({n * part}, DType::kBF16, memory);
  const Tensor other = Tensor::Zeros({n * part}, DType::kBF16, memory);
  const Tensor own = Tensor::Zeros({part}, DType::kBF16, memory);
  const std::int64_t size = whole.bytes();
  Bench(comm, device, "all_reduce", size, 2 * share, [&] { comm.AllReduce(whole); });
  Bench(adds_here, device, "all_reduce, added here", size, 2 * share,
        [&] { adds_here.AllReduce(whole); });
  Bench(comm, device, "reduce_scatter", size, share, [&] { comm.ReduceScatter(whole, own); });
  Bench(adds_here, device, "reduce_scatter, added here", size, share,
        [&] { adds_here.ReduceScatter(whole, own); });
  Bench(comm, device, "all_gather", size, share, [&] { comm.AllGather(own, whole); });
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), part);
  Bench(comm, device, "all_to_all", size, share,
        [&] { comm.AllToAll(whole, counts, other, counts); });
}

int Run(comm::Communicator& control) {
  const Device device = comm::nccl::DeviceOfRank(control);
  const auto comm = comm::nccl::Connect(control, device);
  const auto adds_here = comm::nccl::Connect(control, device, {.own_sums = true});
  if (comm->rank() == 0) fmt::print(stderr, "{}\n", comm::nccl::Describe());
  for (const std::int64_t mib : {1, 64, 256}) BenchSize(*comm, *adds_here, device, mib << 20);
  return 0;
}

}  // namespace
}  // namespace cistron

int main() {
  try {
    return cistron::comm::mpi::RunRank(cistron::Run);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
