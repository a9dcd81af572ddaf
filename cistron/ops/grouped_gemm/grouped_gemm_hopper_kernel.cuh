// Device code of grouped_gemm on sm_90a; grouped_gemm_hopper.cu launches it.
//
// A cluster of two blocks, one an SM, works on pairs of 128 × kBlockN tiles of all groups. In a
// block one warp loads (the producer) and two warpgroups multiply and store (the consumers, 64 rows
// each).
//
//   Pairs       Two tiles below each other share their columns of b; the odd last row of tiles of a
//               group is cut into pairs side by side, which share their rows of a. Each block loads
//               half of the shared operand into both (multicast), so a pair reads L2 a third less
//               and ragged groups waste at most 127 rows.
//   Order       Pairs are drawn from a counter in the order of their numbers. Dealt out beforehand,
//               SMs of different pace drift apart and fetch shared operands from memory again.
//   Ragged ends No tensor map is ever made on the device. Along rows of the result a tile may read
//               what lies beyond its group: such rows are not stored. Along a ragged sum (wgrad)
//               the consumers overwrite the lines beyond the group's end in shared memory with
//               zeros before they multiply.
//   Overlap     A stage is free when each consumer has used it: the two need not keep step, and the
//               producer loads the next tile while they store.
//
// Ideas: CUTLASS's cooperative Hopper kernels (roles, setmaxnreg, multicast) and DeepGEMM (grouped
// tiles in a persistent grid). grouped_gemm_hopper_walk.cuh has the order of tiles and the layout
// of shared memory; docs/performance-notes.md has what was tried and measured.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "cistron/ops/cuda/hopper_ptx.cuh"
#include "cistron/ops/cuda/hopper_wgmma.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_walk.cuh"

namespace cistron::ops::internal::sm90 {

// ---- producer ----

// Loads one half of an operand's stage of kExtent rows (or columns) of the result, to this block or
// to both. Halves are cut so that each is a whole number of swizzle atoms: along the rows where the
// summed index is contiguous, along the summed index otherwise.
template <bool kTransposed, int kExtent>
__device__ void LoadHalf(const CUtensorMap* map, std::uint32_t shared, std::uint32_t barrier,
                         int half, int mn, int depth, int z, bool both) {
  const auto load = [&](std::uint32_t to, int x, int y) {
    if (both) {
      hopper::TmaLoadMulticast(to, map, barrier, x, y, z, (1 << kCluster) - 1);
    } else {
      hopper::TmaLoad(to, map, barrier, x, y, z);
    }
  };
  if constexpr (kTransposed) {
    for (int chunk = 0; chunk < kExtent / kChunk; ++chunk) {
      load(shared + chunk * kChunkBytes + half * (kChunkBytes / 2), mn + chunk * kChunk,
           depth + half * (kBlockK / 2));
    }
  } else {
    load(shared + half * (kExtent / 2) * hopper::kSwizzleLine, depth, mn + half * (kExtent / 2));
  }
}

template <class T>
__device__ void Produce(const SharedLayout<T>& shared, const CUtensorMap* map_a,
                        const CUtensorMap* map_b, const KernelArgs& args, int rank) {
  const bool leader = threadIdx.x % 32 == 0;
  TileWalk<T> walk(args, rank);
  Ring<T::kStages> ring;
  Tile tile;
  Deal<T> deal(shared, args, walk.Step());
  for (int index = walk.First(); walk.Find(index, tile); index = deal.Next(index)) {
    if (!leader) continue;
    const int a_mn = T::kWgrad ? tile.m : tile.row_begin + tile.m;
    const int depth_begin = T::kWgrad ? tile.row_begin : 0;
    const int b_group = T::kWgrad ? 0 : tile.group;
    const int blocks = DepthBlocks<T>(args, tile);
    for (int block = 0; block < blocks; ++block, ring.Advance()) {
      const std::uint32_t full = shared.Full(ring.stage);
      const int depth = depth_begin + block * kBlockK;
      hopper::BarrierWait(shared.Empty(ring.stage), ring.phase ^ 1);
      hopper::BarrierArriveExpect(full, T::kStageBytes);
      const auto load_a = [&](int half, bool both) {
        LoadHalf<T::kTransposeA, kBlockM>(map_a, shared.A(ring.stage), full, half, a_mn, depth, 0,
                                          both);
      };
      const auto load_b = [&](int half, bool both) {
        LoadHalf<T::kTransposeB, T::kBlockN>(map_b, shared.B(ring.stage), full, half, tile.n, depth,
                                             b_group, both);
      };
      if (tile.share_b) {
        load_b(rank, true);
        load_a(0, false);
        load_a(1, false);
      } else {
        load_a(rank, true);
        load_b(0, false);
        load_b(1, false);
      }
    }
  }
}

template <class T>
__device__ void DrawTiles(const SharedLayout<T>& shared, const KernelArgs& args) {
  TileWalk<T> walk(args, 0);
  Deal<T> deal(shared, args, walk.Step());
  Tile tile;
  int index = walk.First();
  while (walk.Find(index, tile)) {
    if (threadIdx.x % 32 == 0) index = deal.Draw();
    index = __shfl_sync(~0u, index, 0);
  }
}

// ---- consumers ----

// The products of one stage.
template <class T>
__device__ void MultiplyStage(float (&sums)[T::kSums], std::uint32_t a, std::uint32_t b,
                              bool accumulate) {
  constexpr int kInstructionK = 16;
  constexpr int kStepA = T::kTransposeA ? kInstructionK * hopper::kSwizzleLine : kInstructionK * 2;
  constexpr int kStepB = T::kTransposeB ? kInstructionK * hopper::kSwizzleLine : kInstructionK * 2;
  const std::uint64_t descriptor_a = hopper::WgmmaDescriptor(a, kChunkBytes);
  const std::uint64_t descriptor_b = hopper::WgmmaDescriptor(b, kChunkBytes);
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kBlockK / kInstructionK; ++step) {
    hopper::Wgmma<T::kBlockN, T::kTransposeA, T::kTransposeB>::Run(
        sums, descriptor_a + step * (kStepA >> 4), descriptor_b + step * (kStepB >> 4),
        accumulate || step > 0);
  }
  hopper::WgmmaCommit();
}

// Overwrites the lines of a stage from `valid` on with zeros, in this consumer's rows of a and in
// all of b: they belong to the next group, and 0 · NaN would not be 0. Both consumers write the
// same zeros into b, so neither waits for the other.
template <class T>
__device__ void ZeroTail(std::uint32_t a, std::uint32_t b, int valid, int named_barrier) {
  const int thread = threadIdx.x % kConsumerThreads;
  const int begin = valid * hopper::kSwizzleLine + thread * 16;
  for (int at = begin; at < kChunkBytes; at += kConsumerThreads * 16) {
    hopper::StoreShared(a + at, make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int chunk = 0; chunk < T::kBlockN / kChunk; ++chunk) {
      hopper::StoreShared(b + chunk * kChunkBytes + at, make_uint4(0, 0, 0, 0));
    }
  }
  hopper::FenceProxyAsync();
  hopper::NamedBarrierSync(named_barrier, kConsumerThreads);
}

__device__ inline std::uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

// Stores the rows of one warp, 128 bytes of columns at a time: registers to a swizzled buffer, from
// there to memory in whole lines. Warps never wait for each other here. Ordinary stores are not
// waited for; the copy engine is (its reads of the buffer), so it stores only where it also adds.
template <class T>
class TileStore {
 public:
  __device__ TileStore(const SharedLayout<T>& shared, const CUtensorMap* map,
                       const KernelArgs& args)
      : map_(map), args_(args), buffers_(shared.Store(threadIdx.x / 32)) {}

  // sums: of the tile's columns; m: first of the warp's rows in the group's result.
  __device__ void Run(float (&sums)[T::kSums], const Tile& tile, int m) {
    const int rows = (T::kWgrad ? args_.rows : tile.group_rows) - m;
    if (rows <= 0) return;
    const std::int64_t row = T::kWgrad ? m : tile.row_begin + m;
    Out* const c = static_cast<Out*>(args_.c) + tile.group * args_.group_stride + row * args_.ldc;
    if (!kF32 && args_.accumulate) AddOld(sums, reinterpret_cast<__nv_bfloat16*>(c), tile.n, rows);
    // The copy engine clips at the ends of c, not at the end of a group's rows.
    const bool engine_adds = kF32 && args_.accumulate && (T::kWgrad || rows >= kWarpM);
#pragma unroll
    for (int part = 0; part < T::kBlockN / T::kStoreCols; ++part) {
      const int n = tile.n + part * T::kStoreCols;
      if (n >= args_.cols) break;
      const std::uint32_t buffer = buffers_ + (odd_ ? kStoreBytes : 0);
      odd_ = !odd_;
      if (kF32 && args_.accumulate) {
        if (lane_ == 0) hopper::TmaWaitRead<1>();
        __syncwarp();
      }
      Fill(sums, part, buffer);
      if (engine_adds) hopper::FenceProxyAsync();
      __syncwarp();
      if (!engine_adds) StoreRows(buffer, c, n, rows);
      if (kF32 && args_.accumulate && lane_ == 0) {
        if (engine_adds) {
          hopper::TmaReduceAdd(buffer, map_, n, static_cast<int>(row), T::kWgrad ? tile.group : 0);
        }
        hopper::TmaCommit();  // an empty group where rows were stored: waits count buffers
      }
    }
  }

  __device__ void Finish() {
    if (lane_ == 0) hopper::TmaWaitAll();
  }

 private:
  using Out = typename T::Out;
  static constexpr bool kF32 = std::is_same_v<Out, float>;

  __device__ void AddOld(float (&sums)[T::kSums], const __nv_bfloat16* c, int n, int rows) {
#pragma unroll
    for (int i = 0; i < T::kSums; i += 2) {
      const int row = i % 4 / 2 * 8 + lane_ / 4;
      const int col = n + i / 4 * 8 + lane_ % 4 * 2;
      if (row < rows && col < args_.cols) {
        const float2 old =
            __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(c + row * args_.ldc + col));
        sums[i] += old.x;
        sums[i + 1] += old.y;
      }
    }
  }

  // Rounds and writes columns [part · kStoreCols, …) of the sums to a buffer.
  __device__ void Fill(const float (&sums)[T::kSums], int part, std::uint32_t buffer) {
    constexpr int kPartSums = T::kStoreCols / 2;
    if constexpr (std::is_same_v<Out, float>) {
      const int row = lane_ / 4;
      const std::uint32_t line = buffer + row * hopper::kSwizzleLine + lane_ % 2 * 8;
#pragma unroll
      for (int j = 0; j < T::kStoreCols / 8; ++j) {
        const float* const s = sums + part * kPartSums + 4 * j;
        const std::uint32_t at = line + (((2 * j + lane_ % 4 / 2) ^ row) << 4);
        hopper::StoreShared(at, make_float2(s[0], s[1]));
        hopper::StoreShared(at + 8 * hopper::kSwizzleLine, make_float2(s[2], s[3]));
      }
    } else {
      const int row = lane_ % 16;
      const std::uint32_t line = buffer + row * hopper::kSwizzleLine;
#pragma unroll
      for (int j = 0; j < T::kStoreCols / 16; ++j) {
        const float* const s = sums + part * kPartSums + 8 * j;
        hopper::StoreMatrix(line + (((2 * j + lane_ / 16) ^ (row % 8)) << 4), PackBf16(s[0], s[1]),
                            PackBf16(s[2], s[3]), PackBf16(s[4], s[5]), PackBf16(s[6], s[7]));
      }
    }
  }

  // The buffer's rows that belong to the group, 16 bytes a lane.
  __device__ void StoreRows(std::uint32_t buffer, Out* c, int n, int rows) {
    constexpr int kVectors = hopper::kSwizzleLine / 16;
    constexpr int kVectorCols = 16 / static_cast<int>(sizeof(Out));
    constexpr int kPassRows = 32 / kVectors;
    const int vector = lane_ % kVectors;
    const int first = lane_ / kVectors;
    uint4 v[kWarpM / kPassRows];
#pragma unroll
    for (int pass = 0; pass < kWarpM / kPassRows; ++pass) {
      const int row = first + pass * kPassRows;
      v[pass] =
          hopper::LoadShared(buffer + row * hopper::kSwizzleLine + ((vector ^ (row % 8)) << 4));
    }
    if (n + vector * kVectorCols >= args_.cols) return;
    c += first * args_.ldc + n + vector * kVectorCols;
#pragma unroll
    for (int pass = 0; pass < kWarpM / kPassRows; ++pass, c += kPassRows * args_.ldc) {
      if (first + pass * kPassRows >= rows) break;
      if (kF32 && args_.accumulate) {
        const float4 old = *reinterpret_cast<const float4*>(c);
        v[pass].x = __float_as_uint(__uint_as_float(v[pass].x) + old.x);
        v[pass].y = __float_as_uint(__uint_as_float(v[pass].y) + old.y);
        v[pass].z = __float_as_uint(__uint_as_float(v[pass].z) + old.z);
        v[pass].w = __float_as_uint(__uint_as_float(v[pass].w) + old.w);
      }
      // Results are not read again here: they leave L2 before the operands do.
      __stcs(reinterpret_cast<uint4*>(c), v[pass]);
    }
  }

  const CUtensorMap* map_;
  const KernelArgs& args_;
  std::uint32_t buffers_;
  int lane_ = threadIdx.x % 32;
  bool odd_ = false;
};

template <class T>
__device__ void Consume(const SharedLayout<T>& shared, const CUtensorMap* map_c,
                        const KernelArgs& args, int rank, int consumer) {
  // Each warp tells both blocks that it is done with a stage: nothing promises that the products of
  // the four warps end together.
  const int lane = threadIdx.x % 32;
  const auto release = [&](int stage) {
    if (lane < kCluster) {
      hopper::BarrierArriveCluster(hopper::MapToRank(shared.Empty(stage), lane));
    }
  };
  TileWalk<T> walk(args, rank);
  TileStore<T> store(shared, map_c, args);
  Ring<T::kStages> ring;
  Tile next;
  Deal<T> deal(shared, args, walk.Step());
  int index = walk.First();
  bool more = walk.Find(index, next);
  while (more) {
    const Tile tile = next;
    const auto find_next = [&] {
      index = deal.Next(index);
      more = walk.Find(index, next);
    };
    const int blocks = DepthBlocks<T>(args, tile);
    const int m = tile.m + consumer * kConsumerM;
    const bool any = m < (T::kWgrad ? args.rows : tile.group_rows) && tile.n < args.cols;
    if (!any) {
      // Nothing to compute, yet the pair counts on this consumer to free its stages.
      for (int block = 0; block < blocks; ++block, ring.Advance()) {
        hopper::BarrierWait(shared.Full(ring.stage), ring.phase);
        release(ring.stage);
      }
      find_next();
      continue;
    }
    float sums[T::kSums];
    if (T::kWgrad && blocks == 0) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
    int used = -1;  // the stage that products in flight may still read
    for (int block = 0; block < blocks; ++block, ring.Advance()) {
      const std::uint32_t a = shared.A(ring.stage) + consumer * kChunkBytes;
      const std::uint32_t b = shared.B(ring.stage);
      hopper::BarrierWait(shared.Full(ring.stage), ring.phase);
      if (T::kWgrad && block == blocks - 1 && tile.group_rows % kBlockK != 0) {
        ZeroTail<T>(a, b, tile.group_rows % kBlockK, 1 + consumer);
      }
      MultiplyStage<T>(sums, a, b, block > 0);
      hopper::WgmmaWait<1>();
      if (used >= 0) release(used);
      used = ring.stage;
    }
    find_next();  // while the last products run
    hopper::WgmmaWait<0>();
    if (used >= 0) release(used);
    store.Run(sums, tile, m + threadIdx.x % kConsumerThreads / 32 * kWarpM);
  }
  store.Finish();
}

template <class T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                             const __grid_constant__ CUtensorMap map_b,
                             const __grid_constant__ CUtensorMap map_c,
                             const __grid_constant__ KernelArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // other architectures of a build never launch it
  extern __shared__ __align__(hopper::kSwizzleAtom) unsigned char shared_bytes[];
  const SharedLayout<T> shared{hopper::SharedAddress(shared_bytes)};
  const int rank = static_cast<int>(hopper::ClusterRank());
  if (threadIdx.x == 0) {
    hopper::PrefetchTensorMap(&map_a);
    hopper::PrefetchTensorMap(&map_b);
    hopper::PrefetchTensorMap(&map_c);
    for (int stage = 0; stage < T::kStages; ++stage) {
      hopper::BarrierInit(shared.Full(stage), 1);
      hopper::BarrierInit(shared.Empty(stage), kCluster * kConsumerWarps);
    }
    for (int slot = 0; slot < kDealSlots; ++slot) {
      hopper::BarrierInit(shared.DealFull(slot), 1);
      hopper::BarrierInit(shared.DealEmpty(slot), kCluster * (kConsumerWarps + 1));
    }
    hopper::FenceBarrierInit();
  }
  hopper::ClusterSync();
  hopper::LaunchDependents();
  hopper::WaitForPrecedingKernels();

  const int warpgroup = static_cast<int>(threadIdx.x) / kConsumerThreads;
  if (warpgroup == 2) {
    hopper::SetMaxRegistersDown<kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == kConsumerWarps) Produce<T>(shared, &map_a, &map_b, args, rank);
    if (warp == kConsumerWarps + 1 && rank == 0 && args.next_tile != nullptr) {
      DrawTiles<T>(shared, args);
    }
  } else {
    hopper::SetMaxRegistersUp<kConsumerRegisters>();
    Consume<T>(shared, &map_c, args, rank, warpgroup);
  }
  // The other block may still write into this one's stages and barriers.
  __syncwarp();
  hopper::ClusterSync();
#endif
}

}  // namespace cistron::ops::internal::sm90
