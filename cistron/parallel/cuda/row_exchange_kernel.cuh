// Kernels of row_exchange.h. A kernel that waits for other ranks has one block.
#pragma once

#include <cstdint>

#include "cistron/comm/nccl/peer_memory.h"
#include "cistron/parallel/exchange_plan.h"
#include "cistron/tensor/cuda/check.h"

namespace cistron::parallel::exchange_kernels {

constexpr int kRanks = comm::nccl::PeerMemory::kMostRanks;
constexpr int kWaitThreads = 256;

// What other ranks write into this one's memory, in words of 8 bytes: the number of the last
// exchange that ended here, then for each rank the number of the last exchange that it entered, of
// the last that it left, the place of its buffer, and its counts. A rank that waited in vain has
// kFailed for its numbers from then on, here and with the others: nobody waits for it any more, and
// no exchange of theirs moves rows.
struct Control {
  static constexpr int kEntered = kRanks, kLeft = 2 * kRanks, kPlaces = 3 * kRanks,
                       kCounts = 4 * kRanks;
  static constexpr std::int64_t Words(std::int64_t ranks, std::int64_t experts) {
    return kCounts + ranks * experts;
  }
};
using Word = unsigned long long;
constexpr Word kFailed = ~Word{0};

// Of the step; the host reads them at its end.
struct Status {
  double* flag;          // RowExchange::status
  std::int64_t* needed;  // RowExchange::needed
};

struct WaitArgs {
  Word* control[kRanks];  // of every rank
  int rank, ranks, experts;
  Status status;
  volatile std::int32_t* waits_for;  // of the host: a word a rank, 1 while it is waited for
  Word limit_ns;
};

struct EnterArgs : WaitArgs {
  const std::int64_t* split_sizes;  // [E]; null: no plan is made
  std::int64_t place, capacity;
  std::int64_t *counts, *local_sizes, *out_begins, *out_places, *back_begins, *back_places;
};

__device__ inline void StoreRelease(Word* flag, Word value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ inline Word LoadAcquire(const Word* flag) {
  Word value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline Word Nanoseconds() {
  Word now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// `rows` that a buffer should have had.
__device__ inline void Overflow(const Status& status, std::int64_t rows) {
  if (*status.flag != 0) return;
  *status.needed = rows;
  *status.flag = __longlong_as_double(0x7ff0000000000000ll);  // infinity
}
__device__ inline void Fail(const Status& status, std::int64_t why) {
  *status.needed = why;
  *status.flag = __longlong_as_double(0x7ff8000000000000ll);  // NaN
}

// Thread r tells rank r the number of this exchange and waits until rank r has told its own; the
// words of the two are at `at`. In every thread: whether all came in time; where one did not, this
// rank comes to nothing any more, and tells the others. What the block wrote before is there for
// who reads a number; what other ranks wrote before is here afterwards.
__device__ inline bool Meet(const WaitArgs& a, int at, Word number) {
  __threadfence_system();
  __syncthreads();
  bool came = number != kFailed;
  const int r = static_cast<int>(threadIdx.x);
  if (r < a.ranks && came) {
    StoreRelease(a.control[r] + at + a.rank, number);
    const Word* flag = a.control[a.rank] + at + r;
    Word theirs = LoadAcquire(flag);
    if (theirs < number) {
      a.waits_for[r] = 1;
      const Word begin = Nanoseconds();
      while (theirs < number && Nanoseconds() - begin < a.limit_ns) {
        __nanosleep(50);
        theirs = LoadAcquire(flag);
      }
      if (theirs >= number) a.waits_for[r] = 0;
    }
    came = theirs >= number && theirs != kFailed;
  }
  const bool all_came = __syncthreads_and(came) != 0;
  if (!all_came && r < a.ranks) {
    StoreRelease(a.control[r] + Control::kEntered + a.rank, kFailed);
    StoreRelease(a.control[r] + Control::kLeft + a.rank, kFailed);
    if (r == a.rank) a.control[r][0] = kFailed;
  }
  return all_came;
}

// Of the exchange that this one is, or kFailed.
__device__ inline Word NextNumber(const WaitArgs& a) {
  const Word last = a.control[a.rank][0];
  return last == kFailed ? kFailed : last + 1;
}

__global__ void __launch_bounds__(kWaitThreads) enter_kernel(const __grid_constant__ EnterArgs a) {
  const int thread = static_cast<int>(threadIdx.x);
  Word* own = a.control[a.rank];
  const Word number = NextNumber(a);
  if (thread < a.ranks) {
    a.control[thread][Control::kPlaces + a.rank] = static_cast<Word>(a.place);
  }
  if (a.split_sizes != nullptr) {
    for (int e = thread; e < a.experts; e += kWaitThreads) {
      const auto count = static_cast<Word>(a.split_sizes[e]);
      for (int r = 0; r < a.ranks; ++r) {
        a.control[r][Control::kCounts + static_cast<std::int64_t>(a.rank) * a.experts + e] = count;
      }
    }
  }
  bool good = Meet(a, Control::kEntered, number);
  const bool same = thread >= a.ranks ||
                    static_cast<std::int64_t>(__ldcv(own + Control::kPlaces + thread)) == a.place;
  const bool all_same = __syncthreads_and(same) != 0;
  if (thread == 0) {
    if (!good) {
      Fail(a.status, -1);
    } else if (!all_same) {
      Fail(a.status, -2);
    }
  }
  good = good && all_same;
  if (a.split_sizes == nullptr) return;

  for (int i = thread; i < a.ranks * a.experts; i += kWaitThreads) {
    a.counts[i] = static_cast<std::int64_t>(__ldcv(own + Control::kCounts + i));
  }
  __syncthreads();
  const ExchangePlan plan{a.counts, a.ranks, a.experts};
  __shared__ bool fits;
  if (thread == 0) {
    const std::int64_t most = plan.MostReceived();
    if (good && most > a.capacity) Overflow(a.status, most);
    // Whatever came before in this step: a step that will be made again moves no more rows.
    fits = *a.status.flag == 0;
  }
  __syncthreads();
  const int local = plan.LocalExperts(), first = a.rank * local;
  for (int e = thread; e <= a.experts; e += kWaitThreads) {
    a.out_begins[e] = fits ? plan.RowAtSource(a.rank, e) : 0;
    if (e < a.experts) a.out_places[e] = plan.RowAtOwner(a.rank, e);
  }
  for (int i = thread; i <= local * a.ranks; i += kWaitThreads) {
    const bool end = i == local * a.ranks;
    const int e = first + i / a.ranks, s = i % a.ranks;
    const std::int64_t begin = end ? plan.Received(a.rank) : plan.RowAtOwner(s, e);
    a.back_begins[i] = fits ? begin : 0;
    if (!end) a.back_places[i] = plan.RowAtSource(s, e);
  }
  for (int e = thread; e < local; e += kWaitThreads) {
    a.local_sizes[e] = fits ? plan.OfExpert(first + e) : 0;
  }
}

__global__ void __launch_bounds__(kWaitThreads) leave_kernel(const __grid_constant__ WaitArgs a) {
  const Word number = NextNumber(a);
  const bool good = Meet(a, Control::kLeft, number);
  if (threadIdx.x != 0) return;
  if (good) {
    a.control[a.rank][0] = number;
  } else {
    Fail(a.status, -1);
  }
}

struct PushArgs {
  const std::byte* from;
  std::int64_t stride, width;       // of a row, in bytes
  const std::int32_t* slot_of_row;  // null: row r is at r
  std::int64_t top_k;
  const std::int64_t *begins, *places;
  int runs;
  // The rank of a run: run / runs_of_rank, or where that is 0 run % ranks.
  int runs_of_rank, ranks;
  std::byte* to[kRanks];
  const float* values;  // one a slot, or a row; null: none
  float* values_to[kRanks];
  // Where it is not 0 nothing is pushed, and what should have come to this rank is 0, where it is
  // given: else the step would go on with whatever its memory held, NaN for one, and nobody could
  // tell a step that did not fit from one that diverged.
  const double* status;
  std::byte* own_rows;  // [own, width]
  float* own_values;    // [own]
  std::int64_t own;
};

constexpr int kPushThreads = 512;

template <class V>
__device__ inline void ClearOwn(const PushArgs& a) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kPushThreads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kPushThreads + threadIdx.x;
  const std::int64_t packs = a.own * (a.width / static_cast<std::int64_t>(sizeof(V)));
  auto* rows = reinterpret_cast<V*>(a.own_rows);
  for (std::int64_t i = first; i < packs; i += threads) rows[i] = V{};
  if (a.own_values == nullptr) return;
  for (std::int64_t i = first; i < a.own; i += threads) a.own_values[i] = 0;
}

// A warp takes a range of consecutive rows: the ranges of all warps are spread over all ranks, so
// that no link waits for another's rows. V: what a lane moves at once.
template <class V>
__global__ void __launch_bounds__(kPushThreads) push_kernel(const __grid_constant__ PushArgs a) {
  constexpr int kInFlight = 8;
  if (*a.status != 0) return ClearOwn<V>(a);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kPushThreads / 32);
  const std::int64_t warp =
      static_cast<std::int64_t>(blockIdx.x) * (kPushThreads / 32) + threadIdx.x / 32;
  const std::int64_t rows = a.begins[a.runs];
  const std::int64_t begin = warp * rows / warps, end = (warp + 1) * rows / warps;
  const std::int64_t packs = a.width / static_cast<std::int64_t>(sizeof(V));
  int run = 0;
  for (int low = 0, high = a.runs; low < high;) {  // the last run that begins at `begin` or before
    const int middle = (low + high) / 2;
    if (a.begins[middle] <= begin) {
      run = middle;
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (std::int64_t r = begin; r < end; ++r) {
    while (a.begins[run + 1] <= r) ++run;
    const int rank = a.runs_of_rank > 0 ? run / a.runs_of_rank : run % a.ranks;
    const std::int64_t place = a.places[run] + (r - a.begins[run]);
    const std::int64_t slot = a.slot_of_row != nullptr ? a.slot_of_row[r] : r;
    const auto* from = reinterpret_cast<const V*>(a.from + slot / a.top_k * a.stride);
    auto* to = reinterpret_cast<V*>(a.to[rank] + place * a.width);
    for (std::int64_t c = lane; c < packs; c += 32 * kInFlight) {
      V pack[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (c + i * 32 < packs) pack[i] = from[c + i * 32];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (c + i * 32 < packs) to[c + i * 32] = pack[i];
      }
    }
    if (a.values != nullptr && lane == 0) a.values_to[rank][place] = a.values[slot];
  }
}

// Before the first exchange: a kernel that is loaded when it is first launched may wait for all
// that runs, while what runs here may wait for that very launch. (CUDA C++ Programming Guide, "Lazy
// Loading", on kernels that must run at the same time.)
inline void LoadKernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(&enter_kernel),
                                 reinterpret_cast<const void*>(&leave_kernel),
                                 reinterpret_cast<const void*>(&push_kernel<uint4>),
                                 reinterpret_cast<const void*>(&push_kernel<unsigned>),
                                 reinterpret_cast<const void*>(&push_kernel<unsigned short>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes{};
    cuda::Check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }
}

}  // namespace cistron::parallel::exchange_kernels
