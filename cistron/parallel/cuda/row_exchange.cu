// Launches of row_exchange_kernel.cuh.
#include "cistron/parallel/row_exchange.h"

#include <fmt/format.h>

#include "cistron/comm/nccl/nccl.h"
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/parallel/cuda/row_exchange_kernel.cuh"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/tensor/cuda_graph.h"

namespace cistron::parallel {
namespace {

namespace k = exchange_kernels;
using cuda::Check;
using ops::internal::CheckLaunch;
using ops::internal::StreamOf;

// Blocks of a push: four times as many as fill the links of an H200
// (docs/decisions/0021-rows-without-the-host.md), since half of the rows stay where they are; few
// beside 132 multiprocessors.
constexpr unsigned kPushBlocks = 64, kPushBlocksBeside = 16;

// A kernel gives up later than the thread that watches, which names the operation and the rank.
std::uint64_t LimitOfKernels(double limit_s) {
  return static_cast<std::uint64_t>((1 + 1.1 * limit_s) * 1e9);
}

bool IsMultiple(std::int64_t bytes, const k::PushArgs& a) {
  bool multiple = a.width % bytes == 0 && a.stride % bytes == 0 &&
                  reinterpret_cast<std::uintptr_t>(a.from) % static_cast<std::size_t>(bytes) == 0;
  for (int r = 0; r < a.ranks; ++r) {
    multiple &= reinterpret_cast<std::uintptr_t>(a.to[r]) % static_cast<std::size_t>(bytes) == 0;
  }
  return multiple;
}

void Push(const k::PushArgs& a, unsigned blocks, cudaStream_t stream) {
  if (a.width == 0) return;
  if (IsMultiple(16, a)) {
    k::push_kernel<uint4><<<blocks, k::kPushThreads, 0, stream>>>(a);
  } else if (IsMultiple(4, a)) {
    k::push_kernel<unsigned><<<blocks, k::kPushThreads, 0, stream>>>(a);
  } else {
    k::push_kernel<unsigned short><<<blocks, k::kPushThreads, 0, stream>>>(a);
  }
  CheckLaunch("row exchange");
}

std::string WaitsForText(const Tensor& words) {
  std::string ranks;
  for (int r = 0; r < k::kRanks; ++r) {
    if (static_cast<volatile const std::int32_t*>(words.data<std::int32_t>())[r] == 0) continue;
    ranks += fmt::format("{}{}", ranks.empty() ? "waits for rank " : ", ", r);
  }
  return ranks;
}

// Bytes of a row of a matrix, and between rows; rows are contiguous.
std::int64_t RowBytes(const Tensor& t) {
  return t.dim(1) * static_cast<std::int64_t>(SizeOf(t.dtype()));
}
std::int64_t StrideBytes(const Tensor& t) {
  return t.stride(0) * static_cast<std::int64_t>(SizeOf(t.dtype()));
}

}  // namespace

// A stream whose kernels get a multiprocessor before those of the main stream.
struct RowExchange::Beside {
  explicit Beside(Device where) {
    cuda::RequireDevice(where.index);
    int least = 0, greatest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreate");
    Check(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming), "cudaEventCreate");
    Check(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Beside() {
    cudaEventDestroy(begun);
    cudaEventDestroy(ended);
    cudaStreamDestroy(stream);
  }
  cudaStream_t stream = nullptr;
  cudaEvent_t begun = nullptr, ended = nullptr;
};

RowExchange::RowExchange(comm::Communicator& group, const ops::Context& ctx,
                         std::int64_t num_experts, double limit_s)
    : group_(group),
      num_experts_(num_experts),
      limit_s_(limit_s),
      memory_(std::make_unique<comm::nccl::PeerMemory>(group, ctx.device())) {
  control_ = Empty({k::Control::Words(group.size(), num_experts)}, DType::kI64);
  status_ = ctx.Empty({2}, DType::kF64);
  waits_for_ = Tensor::Zeros({k::kRanks}, DType::kI32, cuda::PinnedAllocator());
  k::LoadKernels();
  FillZero(control_);
  Reset();
  cuda::Synchronize(ctx.device());
  group.Barrier();  // nobody writes a number that is then set to zero
}

RowExchange::~RowExchange() = default;

Tensor RowExchange::Empty(const Shape& shape, DType dtype) {
  return Tensor::Empty(shape, dtype, *memory_);
}

RowExchange::Plan RowExchange::NewPlan(const ops::Context& ctx) const {
  const std::int64_t ranks = group_.size(), experts = num_experts_, local = experts / ranks;
  const Tensor all = ctx.Empty(
      {ranks * experts + local + (experts + 1) + experts + (local * ranks + 1) + local * ranks},
      DType::kI64);
  std::int64_t at = 0;
  const auto next = [&](std::int64_t n) { return all.Slice(0, std::exchange(at, at + n), n); };
  Plan plan;
  plan.counts = next(ranks * experts);
  plan.split_sizes = next(local);
  plan.out_begins = next(experts + 1);
  plan.out_places = next(experts);
  plan.back_begins = next(local * ranks + 1);
  plan.back_places = next(local * ranks);
  return plan;
}

Tensor RowExchange::status() const {
  return status_.Select(0);
}

Tensor RowExchange::needed() const {
  return Tensor::Borrow(status_.data<double>() + 1, {}, DType::kI64, status_.device());
}

void RowExchange::Reset() {
  FillZero(status_);
}

void RowExchange::Watched(const ops::Context& ctx, const char* what,
                          const std::function<void()>& queue) {
  // As a communicator's own exchange in the table of a step's time: what it waits for included.
  if (ctx.recorder() != nullptr) ctx.recorder()->Begin("all_to_all", "peers");
  comm::nccl::Watch(group_, what, queue, [words = waits_for_] { return WaitsForText(words); });
}

std::string RowExchange::WaitsFor() const {
  return WaitsForText(waits_for_);
}

namespace {

k::WaitArgs Waits(const comm::Communicator& group, const comm::nccl::PeerMemory& memory,
                  std::int64_t experts, const Tensor& control, const Tensor& status,
                  const Tensor& waits_for, double limit_s) {
  k::WaitArgs a{};
  a.rank = group.rank();
  a.ranks = group.size();
  a.experts = static_cast<int>(experts);
  for (int r = 0; r < a.ranks; ++r) {
    a.control[r] = reinterpret_cast<k::Word*>(memory.At(r, control.raw()));
  }
  a.status = {status.data<double>(), reinterpret_cast<std::int64_t*>(status.data<double>() + 1)};
  a.waits_for = waits_for.data<std::int32_t>();
  a.limit_ns = LimitOfKernels(limit_s);
  return a;
}

}  // namespace

void RowExchange::Enter(const ops::Context& ctx, const Tensor& split_sizes, const Plan& plan,
                        const Tensor& buffer, std::int64_t capacity) {
  k::EnterArgs a{};
  static_cast<k::WaitArgs&>(a) =
      Waits(group_, *memory_, num_experts_, control_, status_, waits_for_, limit_s_);
  a.place = memory_->Place(buffer.raw());
  a.capacity = capacity;
  if (split_sizes) {
    a.split_sizes = split_sizes.data<std::int64_t>();
    a.counts = plan.counts.data<std::int64_t>();
    a.local_sizes = plan.split_sizes.data<std::int64_t>();
    a.out_begins = plan.out_begins.data<std::int64_t>();
    a.out_places = plan.out_places.data<std::int64_t>();
    a.back_begins = plan.back_begins.data<std::int64_t>();
    a.back_places = plan.back_places.data<std::int64_t>();
  }
  k::enter_kernel<<<1, k::kWaitThreads, 0, StreamOf(ctx)>>>(a);
  CheckLaunch("row exchange");
}

void RowExchange::Leave(const Stream& stream) {
  k::leave_kernel<<<1, k::kWaitThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      Waits(group_, *memory_, num_experts_, control_, status_, waits_for_, limit_s_));
  CheckLaunch("row exchange");
}

void RowExchange::Out(const ops::Context& ctx, const Tensor& split_sizes, const Plan& plan,
                      const Tensor& x, const Tensor& slot_of_row, std::int64_t top_k,
                      const Tensor& probs, const Tensor& rows, const Tensor& probs_out) {
  k::PushArgs a{};
  a.from = static_cast<const std::byte*>(x.raw());
  a.stride = StrideBytes(x);
  a.width = RowBytes(x);
  a.slot_of_row = slot_of_row.data<std::int32_t>();
  a.top_k = top_k;
  a.begins = plan.out_begins.data<std::int64_t>();
  a.places = plan.out_places.data<std::int64_t>();
  a.runs = static_cast<int>(num_experts_);
  a.ranks = group_.size();
  a.runs_of_rank = a.runs / a.ranks;
  for (int r = 0; r < a.ranks; ++r) {
    a.to[r] = memory_->At(r, rows.raw());
    if (probs) a.values_to[r] = reinterpret_cast<float*>(memory_->At(r, probs_out.raw()));
  }
  a.values = probs ? probs.data<float>() : nullptr;
  a.status = status_.data<double>();  // received rows are counted as 0 then, and nobody reads them
  Watched(ctx, "rows to experts", [&] {
    Enter(ctx, split_sizes, plan, rows, rows.dim(0));
    Push(a, kPushBlocks, StreamOf(ctx));
    Leave(ctx.stream());
  });
}

namespace {

k::PushArgs PushBack(const comm::Communicator& group, const comm::nccl::PeerMemory& memory,
                     std::int64_t experts, const Tensor& status, const RowExchange::Plan& plan,
                     const Tensor& rows, const Tensor& values, const Tensor& returned,
                     const Tensor& values_out) {
  k::PushArgs a{};
  a.from = static_cast<const std::byte*>(rows.raw());
  a.stride = StrideBytes(rows);
  a.width = RowBytes(rows);
  a.top_k = 1;
  a.begins = plan.back_begins.data<std::int64_t>();
  a.places = plan.back_places.data<std::int64_t>();
  a.ranks = group.size();
  a.runs = static_cast<int>(experts);  // L · ranks
  for (int r = 0; r < a.ranks; ++r) {
    a.to[r] = memory.At(r, returned.raw());
    if (values) a.values_to[r] = reinterpret_cast<float*>(memory.At(r, values_out.raw()));
  }
  a.values = values ? values.data<float>() : nullptr;
  a.status = status.data<double>();
  a.own_rows = static_cast<std::byte*>(returned.raw());
  a.own_values = values ? values_out.data<float>() : nullptr;
  a.own = returned.dim(0);
  return a;
}

}  // namespace

std::function<void()> RowExchange::BackBeside(const ops::Context& ctx, const Plan& plan,
                                              const Tensor& rows, const Tensor& values,
                                              const Tensor& returned, const Tensor& values_out) {
  if (!beside_) beside_ = std::make_unique<Beside>(ctx.device());
  const k::PushArgs a =
      PushBack(group_, *memory_, num_experts_, status_, plan, rows, values, returned, values_out);
  // On the main stream, where it ends before the next kernel takes the device: a kernel beside that
  // waits for a multiprocessor may get one only when that kernel ends.
  Watched(ctx, "rows from experts, begun",
          [&] { Enter(ctx, Tensor(), plan, returned, returned.dim(0)); });
  Beside& b = *beside_;
  Check(cudaEventRecord(b.begun, StreamOf(ctx)), "cudaEventRecord");
  Check(cudaStreamWaitEvent(b.stream, b.begun, 0), "cudaStreamWaitEvent");
  Push(a, kPushBlocksBeside, b.stream);
  Leave({ctx.device(), b.stream});
  Check(cudaEventRecord(b.ended, b.stream), "cudaEventRecord");
  return [this, &b, ctx, main = StreamOf(ctx)] {
    Watched(ctx, "rows from experts, awaited",
            [&] { Check(cudaStreamWaitEvent(main, b.ended, 0), "cudaStreamWaitEvent"); });
  };
}

void RowExchange::Back(const ops::Context& ctx, const Plan& plan, const Tensor& rows,
                       const Tensor& values, const Tensor& returned, const Tensor& values_out) {
  const k::PushArgs a =
      PushBack(group_, *memory_, num_experts_, status_, plan, rows, values, returned, values_out);
  Watched(ctx, "rows from experts", [&] {
    Enter(ctx, Tensor(), plan, returned, returned.dim(0));
    Push(a, kPushBlocks, StreamOf(ctx));
    Leave(ctx.stream());
  });
}

}  // namespace cistron::parallel
