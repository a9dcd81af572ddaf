// Device code of grouped_gemm on sm_90a; grouped_gemm_hopper.cu launches it.
//
// A cluster of two blocks, one an SM, walks over pairs of 128 × kBlockN tiles of all groups. In a
// block one warp loads (the producer) and two warpgroups multiply and store (the consumers, 64 rows
// each).
//
//   Pairs       Two tiles below each other share their columns of b; the odd last row of tiles of a
//               group is cut into pairs side by side, which share their rows of a. Each block loads
//               half of the shared operand into both (multicast), so a pair reads L2 a third less
//               and ragged groups waste at most 127 rows.
//   Ragged ends No tensor map is ever made on the device. Along rows of the result a tile may read
//               what lies beyond its group: such rows are not stored. Along a ragged sum (wgrad)
//               the consumers overwrite the lines beyond the group's end in shared memory with
//               zeros before they multiply.
//   Overlap     A stage is free when each consumer has used it, so the consumers need not keep step,
//               and the producer loads the next tile while they store.
//
// Ideas: CUTLASS's cooperative and ping-pong Hopper kernels (roles, setmaxnreg, multicast) and
// DeepGEMM (grouped tiles in a persistent grid). docs/performance-notes.md has what was measured.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "cistron/cuda/hopper_ptx.cuh"
#include "cistron/cuda/hopper_wgmma.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

namespace cistron::ops::internal::sm90 {

inline constexpr int kBlockM = kHopperBlockM;
inline constexpr int kBlockK = kHopperBlockK;
inline constexpr int kThreads = 384;
inline constexpr int kCluster = 2;
// Rows of a consumer, and its part of an operand's stage.
inline constexpr int kConsumerM = 64;
inline constexpr int kConsumerThreads = 128;
inline constexpr int kConsumerWarps = 8;  // of both
// Rows of one of its warps, and its store buffer of 128 bytes of columns.
inline constexpr int kWarpM = 16;
inline constexpr int kStoreBytes = kWarpM * hopper::kSwizzleLine;
// Columns or rows that share a swizzled line of 128 bytes, and 64 such lines.
inline constexpr int kChunk = 64;
inline constexpr int kChunkBytes = kChunk * hopper::kSwizzleLine;
inline constexpr int kNoTile = 0x7FFFFFFF;  // an index beyond all tiles
// Registers a thread: 168 for each of 384 threads at entry, shared out anew between the roles.
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;

struct KernelArgs {
  int groups;
  int max_rows;
  int rows;   // of one group's result where they do not depend on the counts (wgrad)
  int cols;   // of the result
  int depth;  // summed index where it does not depend on the counts (forward, dgrad)
  // Pairs of row tiles that are walked together over all columns: the columns of b in use are read
  // from memory once for all of them, while their rows of a stay in L2.
  int panel_pairs;
  bool accumulate;
  const std::int64_t* split_sizes;
  void* c;  // ldc and group_stride in elements; the stride is 0 unless c has a matrix a group
  std::int64_t ldc, group_stride;
};

template <GroupedGemmKind kKindOf, int kBlockNOf, class OutOf>
struct Traits {
  using Out = OutOf;
  static constexpr GroupedGemmKind kKind = kKindOf;
  static constexpr bool kWgrad = kKind == GroupedGemmKind::kWgrad;
  // Whether the summed index is not the contiguous one of an operand.
  static constexpr bool kTransposeA = kWgrad;
  static constexpr bool kTransposeB = kKind != GroupedGemmKind::kForward;

  static constexpr int kBlockN = kBlockNOf;
  static constexpr int kStages = HopperStages(kBlockN);
  static constexpr int kBytesA = kBlockM * kBlockK * 2;
  static constexpr int kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kStoreCols = hopper::kSwizzleLine / static_cast<int>(sizeof(Out));
  static constexpr int kSums = kBlockN / 2;  // registers of a thread
};

// ---- which tile ----

struct Tile {
  int group;
  int row_begin;  // of the group in the rows of the operands
  int group_rows;
  int m, n;      // of the tile within the group's result
  bool share_b;  // which operand this pair shares
};

// Finds the tile of a growing index. A warp works together: each lane holds one of 32 consecutive
// groups, so nothing is kept in memory and the counts are read once.
template <class T>
class TileWalk {
 public:
  __device__ TileWalk(const KernelArgs& args, int rank) : args_(args), rank_(rank) {
    col_tiles_ = CeilDiv(args.cols, T::kBlockN);
    Load(0, 0);
    if (args.groups <= 32) {
      const int pairs = __shfl_sync(~0u, tiles_end_, 31);
      if (pairs > clusters_) clusters_ = CeilDiv(pairs, CeilDiv(pairs, clusters_));
    }
  }

  // The first index of this cluster, or one beyond all, and the step to its next.
  __device__ int First() const {
    const int cluster = blockIdx.x / kCluster;
    return cluster < clusters_ ? cluster : kNoTile;
  }
  __device__ int Step() const { return clusters_; }

  // All lanes with the same index, never smaller than before; false when there are no more tiles.
  __device__ bool Find(int index, Tile& tile) {
    for (;;) {
      const unsigned found = __ballot_sync(~0u, index < tiles_end_);
      if (found != 0) {
        const int lane = __ffs(found) - 1;
        tile.group = window_ + lane;
        tile.row_begin = __shfl_sync(~0u, row_begin_, lane);
        tile.group_rows = __shfl_sync(~0u, rows_, lane);
        const int tiles = __shfl_sync(~0u, tiles_, lane);
        const int tiles_end = __shfl_sync(~0u, tiles_end_, lane);
        Place(index - (tiles_end - tiles), tile);
        return true;
      }
      if (window_ + 32 >= args_.groups) return false;
      const int row_end = __shfl_sync(~0u, row_begin_ + rows_, 31);
      const int tiles_end = __shfl_sync(~0u, tiles_end_, 31);
      window_ += 32;
      Load(row_end, tiles_end);
    }
  }

 private:
  static __device__ int CeilDiv(int a, int b) { return (a + b - 1) / b; }

  template <class V>
  static __device__ V InclusiveSum(V v) {
    const int lane = threadIdx.x % 32;
    for (int d = 1; d < 32; d *= 2) {
      const V below = __shfl_up_sync(~0u, v, d);
      if (lane >= d) v += below;
    }
    return v;
  }

  __device__ void Load(int row_base, int tile_base) {
    const int group = window_ + static_cast<int>(threadIdx.x % 32);
    const std::int64_t limit = args_.max_rows;
    std::int64_t count = group < args_.groups ? args_.split_sizes[group] : 0;
    count = max(std::int64_t{0}, min(count, limit));
    const std::int64_t end = min(row_base + InclusiveSum(count), limit);
    const std::int64_t begin = min(row_base + InclusiveSum(count) - count, limit);
    row_begin_ = static_cast<int>(begin);
    rows_ = static_cast<int>(end - begin);
    tiles_ = group < args_.groups ? TilePairs() : 0;
    tiles_end_ = tile_base + InclusiveSum(tiles_);
  }

  __device__ int TilePairs() const {
    if (T::kWgrad && args_.accumulate && rows_ == 0) return 0;
    const int row_tiles = CeilDiv(T::kWgrad ? args_.rows : rows_, kBlockM);
    return row_tiles / 2 * col_tiles_ + row_tiles % 2 * CeilDiv(col_tiles_, 2);
  }

  __device__ void Place(int index, Tile& tile) const {
    const int row_tiles = CeilDiv(T::kWgrad ? args_.rows : tile.group_rows, kBlockM);
    const int pairs = row_tiles / 2;
    tile.share_b = index < pairs * col_tiles_;
    if (tile.share_b) {
      const int panel = index / (args_.panel_pairs * col_tiles_);
      const int first = panel * args_.panel_pairs;
      const int height = min(args_.panel_pairs, pairs - first);
      const int in_panel = index - first * col_tiles_;
      tile.m = (2 * (first + in_panel % height) + rank_) * kBlockM;
      tile.n = in_panel / height * T::kBlockN;
    } else {
      tile.m = (row_tiles - 1) * kBlockM;
      tile.n = (2 * (index - pairs * col_tiles_) + rank_) * T::kBlockN;
    }
  }

  const KernelArgs& args_;
  int rank_, col_tiles_;
  int clusters_ = gridDim.x / kCluster;
  int window_ = 0;                                // group of lane 0
  int row_begin_, rows_, tiles_, tiles_end_ = 0;  // of this lane's group; pairs of tiles
};

template <class T>
__device__ int DepthBlocks(const KernelArgs& args, const Tile& tile) {
  return ((T::kWgrad ? tile.group_rows : args.depth) + kBlockK - 1) / kBlockK;
}

// ---- stages ----

// A position in the ring of stages.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Shared memory: stages of a and b, two store buffers a warp, barriers.
template <class T>
struct SharedLayout {
  std::uint32_t base;
  static constexpr int kStoreOffset = T::kStages * T::kStageBytes;
  static constexpr int kBarrierOffset = kStoreOffset + kConsumerWarps * 2 * kStoreBytes;
  static constexpr int kBytes = kBarrierOffset + 2 * T::kStages * 8;

  __device__ std::uint32_t A(int stage) const { return base + stage * T::kStageBytes; }
  __device__ std::uint32_t B(int stage) const { return A(stage) + T::kBytesA; }
  __device__ std::uint32_t Store(int warp) const {
    return base + kStoreOffset + warp * 2 * kStoreBytes;
  }
  __device__ std::uint32_t Full(int stage) const { return base + kBarrierOffset + stage * 8; }
  __device__ std::uint32_t Empty(int stage) const { return Full(T::kStages + stage); }
};

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
  for (int index = walk.First(); walk.Find(index, tile); index += walk.Step()) {
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
        const float2 old = __bfloat1622float2(
            *reinterpret_cast<const __nv_bfloat162*>(c + row * args_.ldc + col));
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
        hopper::StoreMatrix(line + (((2 * j + lane_ / 16) ^ (row % 8)) << 4),
                            PackBf16(s[0], s[1]), PackBf16(s[2], s[3]), PackBf16(s[4], s[5]),
                            PackBf16(s[6], s[7]));
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
      v[pass] = hopper::LoadShared(buffer + row * hopper::kSwizzleLine +
                                   ((vector ^ (row % 8)) << 4));
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
  int index = walk.First();
  bool more = walk.Find(index, next);
  while (more) {
    const Tile tile = next;
    const auto find_next = [&] {
      index += walk.Step();
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
__global__ __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    void sm90_grouped_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                                  const __grid_constant__ CUtensorMap map_b,
                                  const __grid_constant__ CUtensorMap map_c,
                                  const __grid_constant__ KernelArgs args) {
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
    hopper::FenceBarrierInit();
  }
  hopper::ClusterSync();
  hopper::LaunchDependents();
  hopper::WaitForPrecedingKernels();

  const int warpgroup = static_cast<int>(threadIdx.x) / kConsumerThreads;
  if (warpgroup == 2) {
    hopper::SetMaxRegistersDown<kProducerRegisters>();
    if (threadIdx.x / 32 == 8) Produce<T>(shared, &map_a, &map_b, args, rank);
  } else {
    hopper::SetMaxRegistersUp<kConsumerRegisters>();
    Consume<T>(shared, &map_c, args, rank, warpgroup);
  }
  // The other block may still write into this one's stages and barriers.
  __syncwarp();
  hopper::ClusterSync();
}

}  // namespace cistron::ops::internal::sm90
