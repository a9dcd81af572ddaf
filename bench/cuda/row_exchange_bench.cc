// Rows to the experts of other ranks and back, beside NCCL's all-to-all of as many bytes.
//
//   mpirun -np N row_exchange_bench
//
// `bus_gb_per_s` counts what a GPU must send, (N − 1)/N of all rows, as nccl_bench does; a rank's
// own rows are moved as well. Times are between events of the main stream around as many exchanges
// as take some time, flags included, the slowest rank's, median of the repeats.
#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

#include "bench/cuda/slowest_rank.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/parallel/peer_dispatcher.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron {
namespace {

constexpr std::int64_t kExperts = 8, kTopK = 2, kWidth = 4096;

void Bench(comm::Communicator& comm, Device device, const char* what, std::int64_t bytes,
           const std::function<void()>& function) {
  const double ms = bench::SlowestRankMs(comm, device, function);
  if (comm.rank() != 0) return;
  const double share = static_cast<double>(comm.size() - 1) / comm.size();
  fmt::print("{{\"exchange\": \"{}\", \"mib\": {}, \"ms\": {:.4f}, \"bus_gb_per_s\": {:.1f}}}\n",
             what, bytes >> 20, ms, share * static_cast<double>(bytes) * 1e-6 / ms);
  std::fflush(stdout);
}

void BenchSize(comm::Communicator& comm, const ops::Context& ctx, std::int64_t mib) {
  const std::int64_t n = comm.size();
  const std::int64_t rows = (mib << 20) / (2 * kWidth), tokens = rows / kTopK;
  const parallel::Mesh mesh(comm, 1, n, kExperts);
  parallel::RowExchange exchange(mesh.expert_group(), ctx, kExperts, 60);
  const Tensor chosen = Tensor::Empty({tokens, kTopK}, DType::kI32);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < kTopK; ++k) {
      chosen.data<std::int32_t>()[t * kTopK + k] =
          static_cast<std::int32_t>((t + k * 3) % kExperts);
    }
  }
  const ops::RowMap map = ops::BuildRowMap(ctx, ctx.Place(chosen), kExperts);
  const parallel::RowExchange::Plan plan = exchange.NewPlan(ctx);
  const Tensor x = ctx.Zeros({tokens, kWidth}, DType::kBF16);
  const Tensor received = exchange.Empty({rows + rows / 2, kWidth}, DType::kBF16);
  const Tensor returned = exchange.Empty({rows, kWidth}, DType::kBF16);
  Bench(comm, ctx.device(), "dispatch", mib << 20, [&] {
    exchange.Out(ctx, map.split_sizes, plan, x, map.slot_of_row, kTopK, Tensor(), received,
                 Tensor());
  });
  Bench(comm, ctx.device(), "combine", mib << 20,
        [&] { exchange.Back(ctx, plan, received, Tensor(), returned, Tensor()); });
  const Tensor a = ctx.Zeros({rows, kWidth}, DType::kBF16),
               b = ctx.Zeros({rows, kWidth}, DType::kBF16);
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(n), rows / n);
  Bench(comm, ctx.device(), "NCCL, rows in order already", mib << 20,
        [&] { comm.AllToAll(a, counts, b, counts); });
}

int Run(comm::Communicator& control) {
  const Device device = comm::nccl::DeviceOfRank(control);
  const auto comm = comm::nccl::Connect(control, device);
  const std::string why = comm::nccl::WhyNoPeers(*comm, device);
  if (!why.empty()) {
    if (comm->rank() == 0) fmt::print(stderr, "these GPUs do not reach each other: {}\n", why);
    return 1;
  }
  const ops::Context ctx(device);
  for (const std::int64_t mib : {1, 64, 256}) BenchSize(*comm, ctx, mib);
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
