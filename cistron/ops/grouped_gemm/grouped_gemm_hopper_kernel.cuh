// Device code of grouped_gemm on sm_90a; grouped_gemm_hopper.cu launches it.
//
// A cluster of two blocks, one an SM, works on pairs of 128 × kBlockN tiles of all groups. In a
// block one warp loads (the producer) and two warpgroups multiply and store (the consumers, 64 rows
// each). Where more is to be done than to store, the consumers hand their sums over to a fourth
// warpgroup (the finisher) and multiply on.
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
//               producer loads the next tile while they store. A finisher has a tile's whole main
//               loop for the arithmetic of the one before, which costs consumers the time in which
//               they round their sums and write them to shared memory.
//
// Ideas: CUTLASS's cooperative Hopper kernels (roles, setmaxnreg, multicast), its Blackwell ones
// (warps of their own for the epilogue) and DeepGEMM (grouped tiles in a persistent grid).
// grouped_gemm_hopper_walk.cuh has the order of tiles and the layout of shared memory;
// docs/performance-notes.md has what was tried and measured.
#pragma once

#include "cistron/ops/cuda/dependent_launch.cuh"
#include "cistron/ops/cuda/hopper_ptx.cuh"
#include "cistron/ops/cuda/hopper_wgmma.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_store.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_swiglu.cuh"
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
        // The ups of a tile's gates are rows of w that lie all gates further on.
        const int apart = T::kEpilogue == Epilogue::kSwiGlu ? args.cols - T::kTileCols : 0;
        LoadHalf<T::kTransposeB, T::kBlockN>(map_b, shared.B(ring.stage), full, half,
                                             tile.n + half * apart, depth, b_group, both);
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

template <class T>
using TileSink = std::conditional_t<
    T::kHandsOver, TileHandOver<T>,
    std::conditional_t<T::kEpilogue == Epilogue::kSwiGlu, SwiGluStore<T>, TileStore<T>>>;

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
  TileSink<T> sink(shared, map_c, args, consumer);
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
    sink.Begin(tile, m + threadIdx.x % kConsumerThreads / 32 * kWarpM);
    hopper::WgmmaWait<0>();
    if (used >= 0) release(used);
    sink.Run(sums, tile, m + threadIdx.x % kConsumerThreads / 32 * kWarpM);
  }
  sink.Finish();
}

// ---- finisher ----

template <class T>
using FinishOf =
    std::conditional_t<T::kEpilogue == Epilogue::kSwiGlu, SwiGluFinish<T>, SwiGluBackwardFinish<T>>;

// The warps of the finisher walk the tiles as consumers do, a main loop behind them.
template <class T>
__device__ void Finish(const SharedLayout<T>& shared, const KernelArgs& args, int rank) {
  TileWalk<T> walk(args, rank);
  FinishOf<T> finish(shared, args);
  Tile next;
  Deal<T> deal(shared, args, walk.Step());
  int index = walk.First();
  bool more = walk.Find(index, next);
  while (more) {
    const Tile tile = next;
    index = deal.Next(index);  // before the tile: nobody draws on until all have read this
    more = walk.Find(index, next);
    const bool next_too = more && next.n < args.cols;
    if (tile.n < args.cols) finish.Run(tile, next, next_too);
  }
}

template <class T>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(T::kThreads, 1)
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
    if constexpr (T::kEpilogue == Epilogue::kStore) hopper::PrefetchTensorMap(&map_c);
    for (int stage = 0; stage < T::kStages; ++stage) {
      hopper::BarrierInit(shared.Full(stage), 1);
      hopper::BarrierInit(shared.Empty(stage), kCluster * kConsumerWarps);
    }
    for (int slot = 0; slot < kDealSlots; ++slot) {
      hopper::BarrierInit(shared.DealFull(slot), 1);
      hopper::BarrierInit(shared.DealEmpty(slot), kCluster * Deal<T>::kReaders);
    }
    for (int consumer = 0; T::kHandsOver && consumer < kBlockM / kConsumerM; ++consumer) {
      hopper::BarrierInit(shared.HandedFull(consumer), kConsumerWarps / 2);
      hopper::BarrierInit(shared.HandedEmpty(consumer), kFinisherWarps);
    }
    hopper::FenceBarrierInit();
  }
  hopper::ClusterSync();
  internal::LetNextKernelStart();
  internal::WaitForKernelBefore();

  const int warpgroup = static_cast<int>(threadIdx.x) / kConsumerThreads;
  if (warpgroup == 2) {
    hopper::SetMaxRegistersDown<T::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == kConsumerWarps) Produce<T>(shared, &map_a, &map_b, args, rank);
    if (warp == kConsumerWarps + 1 && rank == 0 && args.next_tile != nullptr) {
      DrawTiles<T>(shared, args);
    }
  } else if (warpgroup == 3) {
    if constexpr (T::kHandsOver) {
      hopper::SetMaxRegistersUp<T::kFinisherRegisters>();
      Finish<T>(shared, args, rank);
    }
  } else {
    hopper::SetMaxRegistersUp<T::kConsumerRegisters>();
    Consume<T>(shared, &map_c, args, rank, warpgroup);
  }
  // The other block may still write into this one's stages and barriers.
  __syncwarp();
  hopper::ClusterSync();
#endif
}

}  // namespace cistron::ops::internal::sm90
