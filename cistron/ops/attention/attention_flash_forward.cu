// Forward of attention on tensor cores: a block 128 queries of one head, which go through the tiles
// of keys they see with a running maximum and sum. Tiles of the next keys and values are copied
// while those of this round are multiplied.
//
// Source: Dao, "FlashAttention-2", 2023; the running softmax is Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018.
#include "cistron/ops/attention/attention_cuda.h"
#include "cistron/ops/attention/attention_flash_tile.cuh"
#include "cistron/ops/attention/attention_impls.h"
#include "cistron/ops/attention/attention_supports_flash.h"

namespace cistron::ops {
namespace internal {
namespace {

struct FlashForwardArgs {
  FlashProblem p;
  HeadRows<const bf16> q, k, v;
  HeadRows<bf16> o;
  float* lse;  // [Hq, T] or null
  bool accumulate;
};

template <int kHeadDim>
struct FlashForwardTile {
  static constexpr int kDim = kHeadDim;
  // 32 queries a warp: each fragment of k and v is used twice. Narrow heads have few products, and
  // small problems few tiles.
  static constexpr int kM = kDim == 32 ? 1 : 2;
  static constexpr int kQueries = 16 * kM * kFlashWarps;
  static constexpr int kKeys = 64;
  static constexpr int kQBytes = kQueries * FlashRows<kDim>::kBytes;
  static constexpr int kKBytes = kKeys * FlashRows<kDim>::kBytes;
  static constexpr int kBytes = kQBytes + 4 * kKBytes;  // two stages of k and v
  // As many as registers leave.
  static constexpr int kBlocks = kDim == 128 ? 2 : (kDim == 64 ? 3 : 5);
};

// The softmax of a lane's rows, whose probabilities are relative to a reference score. It follows
// the largest score of the row only when that is more than kSlack above it, in units of log 2: any
// reference gives the same result, and sums are rarely scaled. Totals are those of the lane's own
// columns until Finish.
template <class Tile>
struct FlashSoftmax {
  static constexpr float kSlack = 8.0f;
  float reference[Tile::kM][2], total[Tile::kM][2];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -INFINITY;
        total[m][half] = 0.0f;
      }
    }
  }
  // Nothing is visible yet, or only NaN: exp2 of -inf - 0 is 0.
  __device__ __forceinline__ float Shift(int m, int half, float scale_log2) const {
    return reference[m][half] == -INFINITY ? 0.0f : -reference[m][half] * scale_log2;
  }
  // Turns scores into probabilities; scores of -inf become 0, NaN stays in the sums.
  __device__ __forceinline__ void Step(float scale_log2, float (&s)[Tile::kM][Tile::kKeys / 8][4],
                                       FlashSums<Tile::kDim, Tile::kM>& sums) {
    float largest[Tile::kM][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < Tile::kKeys / 8; ++n) {
          x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        largest[m][half] = x;
        moves |= (x - reference[m][half]) * scale_log2 > kSlack;
      }
    }
    if (__any_sync(0xffffffffu, moves)) Move(scale_log2, largest, sums);
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = Shift(m, half, scale_log2);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = mma::Exp2(__fmaf_rn(s[m][n][i], scale_log2, shift));
            sum += s[m][n][i];
          }
        }
        total[m][half] += sum;
      }
    }
  }
  // References become the largest scores, and what was summed relative to the old ones follows.
  __device__ __forceinline__ void Move(float scale_log2, const float (&largest)[Tile::kM][2],
                                       FlashSums<Tile::kDim, Tile::kM>& sums) {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = reference[m][half];
        reference[m][half] = fmaxf(before, largest[m][half]);
        const float factor = mma::Exp2(__fmaf_rn(before, scale_log2, Shift(m, half, scale_log2)));
        total[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < Tile::kDim / 8; ++n) {
          sums.v[m][n][2 * half] *= factor;
          sums.v[m][n][2 * half + 1] *= factor;
        }
      }
    }
  }
  // Sums totals over the lanes of a row.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[m][half] += __shfl_xor_sync(0xffffffffu, total[m][half], 1);
        total[m][half] += __shfl_xor_sync(0xffffffffu, total[m][half], 2);
      }
    }
  }
};

// As ClearFlashPadding.
__device__ inline void ClearLsePadding(const FlashProblem& p, float* lse, int index, int blocks) {
  for (std::int64_t row = p.sequences.Used() + std::int64_t{kFlashThreads} * index + threadIdx.x;
       row < p.sequences.tokens; row += std::int64_t{kFlashThreads} * blocks) {
    lse[row] = 0.0f;
  }
}

template <class Tile>
__global__ void __launch_bounds__(kFlashThreads, Tile::kBlocks)
    attention_flash_forward_kernel(const FlashForwardArgs args) {
  constexpr int kDim = Tile::kDim, kM = Tile::kM, kKeys = Tile::kKeys;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FlashProblem& p = args.p;
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  const int tile_index = static_cast<int>(blockIdx.x) / p.heads;
  const int tiles = static_cast<int>(gridDim.x) / p.heads;
  const int q_column = head * p.dim, kv_column = head / p.group * p.dim;
  if (!args.accumulate) ClearFlashPadding(p, args.o, q_column, tile_index, tiles);
  if (args.lse != nullptr) {
    ClearLsePadding(p, args.lse + head * p.sequences.tokens, tile_index, tiles);
  }
  const FlashTile& tile =
      FindFlashTile(p.sequences, tile_index, Tile::kQueries, /*late_first=*/true);
  if (tile.length == 0) return;

  const std::uint32_t q_tile = mma::SharedAddress(shared), k_tiles = q_tile + Tile::kQBytes,
                      v_tiles = k_tiles + 2 * Tile::kKBytes;
  const auto copy_keys = [&](int key, int stage) {
    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kKBytes);
    CopyRows<kDim, kKeys>(args.k, tile.begin + key, kv_column, tile.length - key, p.dim,
                          k_tiles + at);
    CopyRows<kDim, kKeys>(args.v, tile.begin + key, kv_column, tile.length - key, p.dim,
                          v_tiles + at);
  };

  // Tiles of keys begin where those of queries do.
  const int first = p.window == 0 ? 0 : max(0, tile.row - p.window + 1) / kKeys * kKeys;
  const auto last = [&] { return min(tile.length, tile.row + Tile::kQueries); };
  CopyRows<kDim, Tile::kQueries>(args.q, tile.begin + tile.row, q_column, tile.length - tile.row,
                                 p.dim, q_tile);
  copy_keys(first, first / kKeys % 2);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t lane_offset = FlashRows<kDim>::LaneOffset();
  const std::uint32_t q_rows =
      q_tile + static_cast<std::uint32_t>(warp * kM * FlashRows<kDim>::kSubTile) + lane_offset;

  FlashSums<kDim, kM> sums;
  FlashSoftmax<Tile> softmax;
  sums.Clear();
  softmax.Clear();
  for (int key = first; key < last(); key += kKeys) {
    const int stage = key / kKeys % 2;
    mma::WaitCopies();
    __syncthreads();  // shows this round's copies; what the round before read may be overwritten
    if (key + kKeys < last()) copy_keys(key + kKeys, stage ^ 1);
    const int query = tile.row + 16 * kM * warp;  // first of the warp
    // Whether the warp has a query that sees a key of the tile.
    if (key > query + 16 * kM - 1 || query >= tile.length ||
        (p.window != 0 && key + kKeys - 1 <= query - p.window)) {
      continue;
    }
    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kKBytes) + lane_offset;
    float s[kM][kKeys / 8][4];
    MultiplyRows<kDim, kM, kKeys / 16>(q_rows, k_tiles + at, s);
    if (key + kKeys - 1 > query || (p.window != 0 && query + 16 * kM - 1 - key >= p.window)) {
      const int distance = query + lane / 4 - key - lane % 4 * 2;  // of query and key 0
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int own = distance + 16 * m + i / 2 * 8 - 8 * n - i % 2;
            if (own < 0 || (p.window != 0 && own >= p.window)) s[m][n][i] = -INFINITY;
          }
        }
      }
    }
    softmax.Step(p.scale_log2, s, sums);
    PackedSquare<kM, kKeys / 16> probabilities;
    probabilities.Pack(s);
    sums.Add(probabilities, v_tiles + at);
  }

  softmax.Finish();
  const int query = tile.row + 16 * kM * warp;
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = 1.0f / softmax.total[m][half];
      const int row = query + 16 * m + 8 * half + lane / 4;
      if (args.lse != nullptr && lane % 4 == 0 && row < tile.length) {
        args.lse[head * p.sequences.tokens + tile.begin + row] =
            __fmaf_rn(softmax.reference[m][half], p.scale, logf(softmax.total[m][half]));
      }
    }
  }
  sums.Store(args.o, tile.begin, q_column, query, tile.length, p.dim, factor, args.accumulate);
}

}  // namespace

void AttentionForwardFlash(const Context& ctx, const AttentionConfig& config,
                           const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& lse, const Output& o) {
  const std::int64_t dim = config.head_dim;
  if (q.dim(0) == 0) return;
  FlashForwardArgs args{};
  args.p = MakeFlashProblem(config, sequences, q.dim(0));
  args.q = MakeHeadRows<const bf16>(q, dim);
  args.k = MakeHeadRows<const bf16>(k, dim);
  args.v = MakeHeadRows<const bf16>(v, dim);
  args.o = MakeHeadRows<bf16>(o.tensor, dim);
  args.lse = DataOrNull<float>(lse);
  args.accumulate = Accumulates(o);
  DispatchFlashDim(dim, [&](auto width) {
    using Tile = FlashForwardTile<decltype(width)::value>;
    AllowSharedMemory(attention_flash_forward_kernel<Tile>, Tile::kBytes);
    attention_flash_forward_kernel<Tile>
        <<<FlashBlocks(args.p.sequences, args.p.heads, Tile::kQueries), kFlashThreads, Tile::kBytes,
           StreamOf(ctx)>>>(args);
    CheckLaunch("attention forward");
  });
}

}  // namespace internal

extern constinit const AttentionImpl kAttentionFlash = {
    "flash",
    internal::AttentionFlashSupports,
    {internal::AttentionForwardFlash, internal::AttentionBackwardFlash},
    DeviceType::kCuda};

}  // namespace cistron::ops
