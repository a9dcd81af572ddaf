// Which tile of which group a block of the Hopper grouped product works on, and what it keeps in
// shared memory. grouped_gemm_hopper_kernel.cuh says what the tiles are.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cistron/ops/cuda/hopper_ptx.cuh"
#include "cistron/ops/cuda/hopper_wgmma.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

namespace cistron::ops::internal::sm90 {

inline constexpr int kBlockM = kHopperBlockM;
inline constexpr int kBlockK = kHopperBlockK;
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
// Tiles that a cluster may have drawn and not yet begun: enough to hide the drawing, and so few
// that tiles begin nearly in their order.
inline constexpr int kDealSlots = 1;
inline constexpr int kNoTile = 0x7FFFFFFF;  // an index beyond all tiles
// Warps of an epilogue that does not run in the consumers, and threads.
inline constexpr int kFinisherWarps = 4;
inline constexpr int kFinisherThreads = 32 * kFinisherWarps;

// What is done with the sums of a tile.
enum class Epilogue {
  kStore,  // c (= or +=) sums, by the consumers
  // grouped_gemm_hopper_swiglu.cuh; but for the widest tiles by warps of their own, to which the
  // consumers hand their sums over, rounded
  kSwiGlu,          // half of the columns are gates, half ups
  kSwiGluBackward,  // the sums are dA
};

// Of the two SwiGLU epilogues; rows are those of the operands, strides in elements.
struct SwiGluArgs {
  const float* row_scale;  // null: 1
  // [gate | up]: written forward, null when not wanted; read backward.
  __nv_bfloat16* pre;
  std::int64_t ld_pre;
  __nv_bfloat16* act;  // A; backward null when not wanted
  std::int64_t ld_act;
  __nv_bfloat16* dpre;  // [dgate | dup]; may be pre
  std::int64_t ld_dpre;
  float* scale_parts;  // [tiles across, max_rows]: sums of dA·silu(gate)·up over a tile's columns
};

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
  int* next_tile;  // zero at the start; null when tiles are dealt out beforehand
  const std::int64_t* split_sizes;
  void* c;  // ldc and group_stride in elements; the stride is 0 unless c has a matrix a group
  std::int64_t ldc, group_stride;
  // [groups, ⌈rows / kWarpM⌉, ⌈cols / kBlockN⌉] partial sums of squares of what is stored (wgrad
  // that does not accumulate); null: not wanted
  double* square_sums;
  SwiGluArgs swiglu;
};

template <GroupedGemmKind kKindOf, int kBlockNOf, class OutOf,
          Epilogue kEpilogueOf = Epilogue::kStore>
struct Traits {
  using Out = OutOf;
  static constexpr GroupedGemmKind kKind = kKindOf;
  static constexpr bool kWgrad = kKind == GroupedGemmKind::kWgrad;
  // Whether the summed index is not the contiguous one of an operand.
  static constexpr bool kTransposeA = kWgrad;
  static constexpr bool kTransposeB = kKind != GroupedGemmKind::kForward;

  static constexpr int kBlockN = kBlockNOf;
  static constexpr int kBytesA = kBlockM * kBlockK * 2;
  static constexpr int kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kStoreCols = hopper::kSwizzleLine / static_cast<int>(sizeof(Out));
  static constexpr int kSums = kBlockN / 2;  // registers of a thread

  static constexpr Epilogue kEpilogue = kEpilogueOf;
  // Columns of c by which tiles are apart: gates and their ups share a tile.
  static constexpr int kTileCols = kEpilogue == Epilogue::kSwiGlu ? kBlockN / 2 : kBlockN;
  static constexpr bool kHandsOver = kEpilogue != Epilogue::kStore && kBlockN < 256;
  static_assert(kHandsOver || kEpilogue != Epilogue::kSwiGluBackward);
  static constexpr int kStages = HopperStages(kBlockN, kHandsOver);

  // Warpgroups: two consumers, the producer and, where there is one, the finisher. Registers a
  // thread: an SM's 65,536 in equal parts at entry, shared out anew between the roles.
  static constexpr int kThreads = kHandsOver ? 512 : 384;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = kHandsOver ? 136 : 224;
  static constexpr int kFinisherRegisters = 184;
  // The compiler wants a tile's sums to fit in the equal part.
  static_assert(!kHandsOver || kSums < 65536 / kThreads);
  static_assert(kProducerRegisters + 2 * kConsumerRegisters +
                    (kHandsOver ? kFinisherRegisters : 0) <=
                65536 / kConsumerThreads);
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
    col_tiles_ = CeilDiv(args.cols, T::kTileCols);
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
      tile.n = in_panel / height * T::kTileCols;
    } else {
      tile.m = (row_tiles - 1) * kBlockM;
      tile.n = (2 * (index - pairs * col_tiles_) + rank_) * T::kTileCols;
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

// Shared memory: stages of a and b; two store buffers a warp, or the tile that is handed over;
// barriers.
template <class T>
struct SharedLayout {
  std::uint32_t base;
  static constexpr int kStoreOffset = T::kStages * T::kStageBytes;
  static constexpr int kBarrierOffset =
      kStoreOffset + (T::kHandsOver ? kBlockM * T::kBlockN * 2 + HopperReadAheadBytes(T::kBlockN)
                                    : kConsumerWarps * 2 * kStoreBytes);
  static constexpr int kHandedOffset = kBarrierOffset + 2 * T::kStages * 8;
  static constexpr int kDealOffset = kHandedOffset + 4 * 8;
  static constexpr int kBytes = kDealOffset + kDealSlots * 24;

  __device__ std::uint32_t A(int stage) const { return base + stage * T::kStageBytes; }
  __device__ std::uint32_t B(int stage) const { return A(stage) + T::kBytesA; }
  __device__ std::uint32_t Store(int warp) const {
    return base + kStoreOffset + warp * 2 * kStoreBytes;
  }
  // The half of a tile that a consumer hands over, kChunk columns after another, each a swizzled
  // buffer of kConsumerM lines; a barrier for when it is there and one for when it may be replaced.
  __device__ std::uint32_t Handed(int consumer) const {
    return base + kStoreOffset + consumer * kConsumerM * T::kBlockN * 2;
  }
  // 16 bytes for each thread of the finisher, `vector` of 2 · kBlockN / kChunk; and a word for
  // each.
  __device__ std::uint32_t ReadAhead(int vector) const {
    return Handed(2) + (vector * kFinisherThreads + threadIdx.x % kFinisherThreads) * 16;
  }
  __device__ std::uint32_t ScaleAhead() const {
    return Handed(2) + T::kBlockN / kChunk * 2 * kFinisherThreads * 16 +
           threadIdx.x % kFinisherThreads * 4;
  }
  __device__ std::uint32_t HandedFull(int consumer) const {
    return base + kHandedOffset + consumer * 8;
  }
  __device__ std::uint32_t HandedEmpty(int consumer) const { return HandedFull(2 + consumer); }
  __device__ std::uint32_t Full(int stage) const { return base + kBarrierOffset + stage * 8; }
  __device__ std::uint32_t Empty(int stage) const { return Full(T::kStages + stage); }
  __device__ std::uint32_t DealFull(int slot) const { return base + kDealOffset + slot * 24; }
  __device__ std::uint32_t DealEmpty(int slot) const { return DealFull(slot) + 8; }
  __device__ std::uint32_t DealIndex(int slot) const { return DealFull(slot) + 16; }
};

// ---- which tile next ----

// Draws tiles in their order from a counter in memory: whichever cluster is free takes the next, so
// tiles that share operands stay close in time whatever the pace of their SMs. One thread a cluster
// draws ahead; all warps of both blocks read what it drew.
template <class T>
class Deal {
 public:
  // Warps of a block that read what was drawn.
  static constexpr int kReaders = kConsumerWarps + 1 + (T::kHandsOver ? kFinisherWarps : 0);

  __device__ Deal(const SharedLayout<T>& shared, const KernelArgs& args, int step)
      : shared_(shared), args_(args), step_(step) {}

  // The thread that draws; once for each tile that the cluster takes. Returns the index.
  __device__ int Draw() {
    const int index = step_ + atomicAdd(args_.next_tile, 1);
    hopper::BarrierWaitCluster(shared_.DealEmpty(drawn_.stage), drawn_.phase ^ 1);
    for (int rank = 0; rank < kCluster; ++rank) {
      hopper::StoreCluster(hopper::MapToRank(shared_.DealIndex(drawn_.stage), rank), index);
      hopper::BarrierArriveReleaseCluster(hopper::MapToRank(shared_.DealFull(drawn_.stage), rank));
    }
    drawn_.Advance();
    return index;
  }

  // All lanes of a warp that works on tiles; the index after `index`.
  __device__ int Next(int index) {
    if (args_.next_tile == nullptr) return index + step_;
    hopper::BarrierWaitCluster(shared_.DealFull(read_.stage), read_.phase);
    // All lanes take what lane 0 read, so that one load is all that the slot is needed for. Its
    // arrival releases nothing at cluster scope (which would be a MEMBAR, BarrierArriveCluster),
    // and need not: it waits for the value that was read, for an index is never negative, and the
    // drawer's next store waits for the arrival, so that the load cannot see the store (PTX ISA,
    // memory consistency model, no-thin-air).
    const int next =
        __shfl_sync(~0u, hopper::LoadSharedInt(shared_.DealIndex(read_.stage)), /*lane=*/0);
    if (threadIdx.x % 32 == 0 && next >= 0) {
      hopper::BarrierArriveCluster(hopper::MapToRank(shared_.DealEmpty(read_.stage), 0));
    }
    read_.Advance();
    return next;
  }

 private:
  const SharedLayout<T>& shared_;
  const KernelArgs& args_;
  int step_;
  Ring<kDealSlots> drawn_, read_;
};

}  // namespace cistron::ops::internal::sm90
