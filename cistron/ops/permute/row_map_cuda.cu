// Stable counting sort of assignments on a GPU. Slots are cut into fixed chunks: each chunk counts
// its experts, the counts are added up over the chunks of an expert and over the experts, and each
// chunk places its slots in order. Only counts are added atomically, so that every run gives the
// same map.
#include "cistron/ops/cuda/launch.cuh"
#include "cistron/ops/permute/row_map_cuda.h"

namespace cistron::ops::internal {
namespace {

constexpr int kChunk = 1024;
// The counters of a block lie in shared memory.
constexpr std::int64_t kMaxExperts = 8192;

// The expert of a slot, −1 for one that is outside the range.
__device__ int ExpertOf(const std::int32_t* experts, std::int64_t slot, int num_experts) {
  const int expert = experts[slot];
  return expert >= 0 && expert < num_experts ? expert : -1;
}

// counts[e, chunk] of the slots of a chunk. A block a chunk.
__global__ void count_experts_kernel(const std::int32_t* experts, std::int64_t slots,
                                     int num_experts, std::int64_t chunks, std::int32_t* counts) {
  extern __shared__ int shared[];
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) shared[e] = 0;
  __syncthreads();
  const std::int64_t chunk = blockIdx.x, begin = chunk * kChunk;
  const std::int64_t end = min(slots, begin + kChunk);
  for (std::int64_t s = begin + threadIdx.x; s < end; s += kThreads) {
    const int expert = ExpertOf(experts, s, num_experts);
    if (expert >= 0) atomicAdd(&shared[expert], 1);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) {
    counts[e * chunks + chunk] = shared[e];
  }
}

// Inclusive sum over a block of kThreads; *total is the sum over all. May be called again after a
// __syncthreads.
__device__ std::int32_t BlockInclusiveSum(std::int32_t x, std::int32_t* scratch,
                                          std::int32_t* total) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const std::int32_t other = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += other;
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  std::int32_t sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) x += scratch[w];
    sum += scratch[w];
  }
  *total = sum;
  return x;
}

// Turns the values of a row into the sums of those before; returns their sum, in every thread.
__device__ std::int32_t ExclusiveSums(std::int32_t* values, std::int64_t n) {
  __shared__ std::int32_t scratch[kThreads / 32];
  std::int32_t before = 0;
  for (std::int64_t base = 0; base < n; base += kThreads) {
    const std::int64_t i = base + threadIdx.x;
    const std::int32_t value = i < n ? values[i] : 0;
    std::int32_t total;
    const std::int32_t sum = BlockInclusiveSum(value, scratch, &total);
    if (i < n) values[i] = before + sum - value;
    before += total;
    __syncthreads();
  }
  return before;
}

// counts[e, ·] become sums over the chunks before. A block an expert.
__global__ void sum_chunks_kernel(std::int32_t* counts, std::int64_t chunks,
                                  std::int64_t* split_sizes, std::int32_t* first_row) {
  const std::int64_t expert = blockIdx.x;
  const std::int32_t total = ExclusiveSums(counts + expert * chunks, chunks);
  if (threadIdx.x == 0) {
    split_sizes[expert] = total;
    first_row[expert] = total;
  }
}

// The counts of the experts become their first rows; one more entry is the number of routed rows.
__global__ void sum_experts_kernel(std::int32_t* first_row, int num_experts) {
  const std::int32_t total = ExclusiveSums(first_row, num_experts);
  if (threadIdx.x == 0) first_row[num_experts] = total;
}

// Rows of the slots of a chunk, in the order of the slots. A block a chunk.
__global__ void place_slots_kernel(const std::int32_t* experts, std::int64_t slots, int num_experts,
                                   std::int64_t chunks, const std::int32_t* counts,
                                   const std::int32_t* first_row, std::int32_t* row_of_slot,
                                   std::int32_t* slot_of_row) {
  extern __shared__ int next[];  // the row that an expert's next slot gets
  __shared__ int chosen[kChunk];
  const std::int64_t chunk = blockIdx.x, begin = chunk * kChunk;
  const int size = static_cast<int>(min(slots - begin, std::int64_t{kChunk}));
  const std::int32_t routed = first_row[num_experts];
  for (int e = static_cast<int>(threadIdx.x); e < num_experts; e += kThreads) {
    next[e] = first_row[e] + counts[e * chunks + chunk];
  }
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    chosen[i] = ExpertOf(experts, begin + i, num_experts);
    if (begin + i >= routed) slot_of_row[begin + i] = -1;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  for (int base = 0; base < size; base += 32) {
    const int i = base + lane;
    const int expert = i < size ? chosen[i] : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int row = expert >= 0 ? next[expert] + rank : -1;
    __syncwarp();
    if (expert >= 0 && rank == 0) next[expert] += __popc(same);
    __syncwarp();
    if (i < size) row_of_slot[begin + i] = row;
    if (row >= 0) slot_of_row[row] = static_cast<std::int32_t>(begin + i);
  }
}

}  // namespace

RowMap BuildRowMapCuda(const Context& ctx, const Tensor& experts, std::int64_t num_experts) {
  CISTRON_CHECK(num_experts <= kMaxExperts, "row map: {} experts are more than {}", num_experts,
                kMaxExperts);
  const std::int64_t slots = experts.numel(), chunks = (slots + kChunk - 1) / kChunk;
  const RowMap map{ctx.Empty({num_experts}, DType::kI64), ctx.Empty({slots}, DType::kI32),
                   ctx.Empty({slots}, DType::kI32), experts.dim(1)};
  const Tensor counts = ctx.Empty({num_experts, chunks}, DType::kI32);
  const Tensor first_row = ctx.Empty({num_experts + 1}, DType::kI32);
  const std::int32_t* expert = experts.data<std::int32_t>();
  std::int32_t* count = counts.data<std::int32_t>();
  std::int32_t* first = first_row.data<std::int32_t>();
  const cudaStream_t stream = StreamOf(ctx);
  const int e = static_cast<int>(num_experts);
  const auto blocks = static_cast<unsigned>(chunks);
  const std::size_t counters = static_cast<std::size_t>(num_experts) * sizeof(int);
  if (slots > 0) {
    count_experts_kernel<<<blocks, kThreads, counters, stream>>>(expert, slots, e, chunks, count);
    CheckLaunch("row map");
  }
  sum_chunks_kernel<<<static_cast<unsigned>(num_experts), kThreads, 0, stream>>>(
      count, chunks, map.split_sizes.data<std::int64_t>(), first);
  sum_experts_kernel<<<1, kThreads, 0, stream>>>(first, e);
  if (slots > 0) {
    place_slots_kernel<<<blocks, kThreads, counters, stream>>>(
        expert, slots, e, chunks, count, first, map.row_of_slot.data<std::int32_t>(),
        map.slot_of_row.data<std::int32_t>());
  }
  CheckLaunch("row map");
  return map;
}

}  // namespace cistron::ops::internal
