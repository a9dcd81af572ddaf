// Backward of attention on tensor cores, in two kernels: row sums of do·o, then all gradients. In
// the second a block either owns keys and goes through the queries that see them, one query head of
// their group after another, for dk and dv; or it owns queries, for dq. Both recompute
// probabilities from lse. Nothing is added by two blocks to one place, so that the order of every
// sum is fixed; dq, dk and dv from the same products would save two of seven and need atomics.
//
// Source: Dao, "FlashAttention-2", 2023, algorithm 2.
#include <algorithm>

#include "cistron/ops/attention/attention_cuda.h"
#include "cistron/ops/attention/attention_flash_tile.cuh"

namespace cistron::ops::internal {
namespace {

struct FlashBackwardArgs {
  FlashProblem p;
  int kv_heads;
  int key_blocks;  // blocks that own keys
  HeadRows<const bf16> d_o, q, k, v, o;
  HeadRows<bf16> dq, dk, dv;
  const float* lse;  // [Hq, T]
  float* lse_log2;   // [Hq, T]: lse in units of log 2
  float* delta;      // [Hq, T]: row sums of do·o
  bool add_dq, add_dk, add_dv;
};

// Scores of a query that sees one key have no gradient, whatever the rounding of do·v and do·o.
__device__ __forceinline__ bool SeesOneKey(int window, int query) {
  return window == 1 || query == 0;
}

// kDim / 8 lanes a row of a head.
template <int kDim>
__global__ void __launch_bounds__(kFlashThreads)
    attention_flash_delta_kernel(const FlashBackwardArgs args) {
  constexpr int kLanes = kDim / 8, kRows = kFlashThreads / kLanes;
  const std::int64_t tokens = args.p.sequences.tokens;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const std::int64_t row = item / args.p.heads, head = item % args.p.heads;
  const int d = static_cast<int>(threadIdx.x) % kLanes * 8;
  const bool inside = row < args.p.sequences.Used();
  float sum = 0.0f;
  if (inside && d < args.p.dim) {
    const uint4 x = *reinterpret_cast<const uint4*>(args.d_o.At(row, head * args.p.dim + d));
    const uint4 y = *reinterpret_cast<const uint4*>(args.o.At(row, head * args.p.dim + d));
    const std::uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = __fmaf_rn(__uint_as_float(a[i] << 16), __uint_as_float(b[i] << 16), sum);
      sum =
          __fmaf_rn(__uint_as_float(a[i] & 0xffff0000u), __uint_as_float(b[i] & 0xffff0000u), sum);
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (inside && d == 0) {
    args.delta[head * tokens + row] = sum;
    args.lse_log2[head * tokens + row] = args.lse[head * tokens + row] * kLog2E;
  }
}

// --- dk and dv

template <int kHeadDim>
struct FlashKeysTile {
  static constexpr int kDim = kHeadDim;
  static constexpr int kKeys = 16 * kFlashWarps;
  static constexpr int kQueries = 64;
  static constexpr int kKBytes = kKeys * FlashRows<kDim>::kBytes;
  static constexpr int kQBytes = kQueries * FlashRows<kDim>::kBytes;
  static constexpr int kRowBytes = kQueries * 2 * static_cast<int>(sizeof(float));  // lse, delta
  static constexpr int kBytes = 2 * kKBytes + 4 * kQBytes + 2 * kRowBytes;
};

// Block `block` of those that own keys. Rows of the square tiles are keys here, columns are
// queries.
template <class Tile>
__device__ __forceinline__ void KeyGradients(const FlashBackwardArgs& args, int block,
                                             unsigned char* shared) {
  constexpr int kDim = Tile::kDim, kQueries = Tile::kQueries;
  const FlashProblem& p = args.p;
  const int kv_head = block % args.kv_heads, tile_index = block / args.kv_heads;
  const int kv_column = kv_head * p.dim, tiles = args.key_blocks / args.kv_heads;
  if (!args.add_dk) ClearFlashPadding(p, args.dk, kv_column, tile_index, tiles);
  if (!args.add_dv) ClearFlashPadding(p, args.dv, kv_column, tile_index, tiles);
  // Early keys are seen by most queries.
  const FlashTile& tile = FindFlashTile(p.sequences, tile_index, Tile::kKeys, /*late_first=*/false);
  if (tile.length == 0) return;

  const std::int64_t tokens = p.sequences.tokens;
  const std::uint32_t k_tile = mma::SharedAddress(shared), v_tile = k_tile + Tile::kKBytes,
                      q_tiles = v_tile + Tile::kKBytes, do_tiles = q_tiles + 2 * Tile::kQBytes;
  const float* rows_of_stages =
      reinterpret_cast<const float*>(shared + 2 * Tile::kKBytes + 4 * Tile::kQBytes);
  const std::uint32_t row_values = mma::SharedAddress(rows_of_stages);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const auto copy_queries = [&](int head, int query, int stage) {
    const std::int64_t row = tile.begin + query;
    const int column = head * p.dim;
    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kQBytes);
    CopyRows<kDim, kQueries>(args.q, row, column, tile.length - query, p.dim, q_tiles + at);
    CopyRows<kDim, kQueries>(args.d_o, row, column, tile.length - query, p.dim, do_tiles + at);
    static_assert(2 * kQueries == kFlashThreads);
    const int own = thread % kQueries;
    const float* values = thread < kQueries ? args.lse_log2 : args.delta;
    mma::CopyAsync4(row_values + static_cast<std::uint32_t>(stage * Tile::kRowBytes + thread * 4),
                    values + head * tokens + row + own, own < tile.length - query);
  };

  CopyRows<kDim, Tile::kKeys>(args.k, tile.begin + tile.row, kv_column, tile.length - tile.row,
                              p.dim, k_tile);
  CopyRows<kDim, Tile::kKeys>(args.v, tile.begin + tile.row, kv_column, tile.length - tile.row,
                              p.dim, v_tile);
  // The last query that sees a key of the tile is its last key's, a window later.
  const int last = p.window == 0
                       ? tile.length
                       : min(tile.length, min(tile.length, tile.row + Tile::kKeys) - 1 + p.window);
  int head = kv_head * p.group, query = tile.row;
  const int head_end = head + p.group;
  copy_queries(head, query, 0);

  const std::uint32_t lane_offset = FlashRows<kDim>::LaneOffset();
  const std::uint32_t own_rows =
      static_cast<std::uint32_t>(thread / 32 * FlashRows<kDim>::kSubTile) + lane_offset;
  const int key = tile.row + thread / 32 * 16;  // first of the warp

  FlashSums<kDim, 1> dk, dv;
  dk.Clear();
  dv.Clear();
  for (int stage = 0; head < head_end; stage ^= 1) {
    mma::WaitCopies();
    __syncthreads();  // shows this round's copies; what the round before read may be overwritten
    const int own_query = query;
    query += kQueries;
    if (query >= last) {
      query = tile.row;
      ++head;
    }
    if (head < head_end) copy_queries(head, query, stage ^ 1);

    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kQBytes) + lane_offset;
    float s[1][kQueries / 8][4], ds[1][kQueries / 8][4];
    MultiplyRows<kDim, 1, kQueries / 16>(k_tile + own_rows, q_tiles + at, s);
    MultiplyRows<kDim, 1, kQueries / 16>(v_tile + own_rows, do_tiles + at, ds);
    const float* lse = rows_of_stages + stage * (Tile::kRowBytes / 4) + lane % 4 * 2;
    const float* delta = lse + kQueries;
    const bool all_visible = own_query >= key + 15 && own_query > 0 &&
                             (p.window == 0 || own_query + kQueries - 1 - key < p.window);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 own_lse = *reinterpret_cast<const float2*>(lse + 8 * n);
      const float2 own_delta = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x =
            mma::Exp2(__fmaf_rn(s[0][n][i], p.scale_log2, -(i % 2 == 0 ? own_lse.x : own_lse.y)));
        ds[0][n][i] = x * (ds[0][n][i] - (i % 2 == 0 ? own_delta.x : own_delta.y));
        s[0][n][i] = x;
      }
    }
    if (!all_visible) {
      const int first_query = own_query + lane % 4 * 2, first_key = key + lane / 4;
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int i_query = first_query + 8 * n + i % 2, i_key = first_key + i / 2 * 8;
          const bool visible = i_key <= i_query && (p.window == 0 || i_query - i_key < p.window);
          if (!visible) s[0][n][i] = 0.0f;
          if (!visible || SeesOneKey(p.window, i_query)) ds[0][n][i] = 0.0f;
        }
      }
    }
    PackedSquare<1, kQueries / 16> square;
    square.Pack(s);
    dv.Add(square, do_tiles + at);
    square.Pack(ds);
    dk.Add(square, q_tiles + at);
  }
  const float one[1][2] = {{1.0f, 1.0f}}, scale[1][2] = {{p.scale, p.scale}};
  dk.Store(args.dk, tile.begin, kv_column, key, tile.length, p.dim, scale, args.add_dk);
  dv.Store(args.dv, tile.begin, kv_column, key, tile.length, p.dim, one, args.add_dv);
}

// --- dq

template <int kHeadDim>
struct FlashQueriesTile {
  static constexpr int kDim = kHeadDim;
  // 32 queries a warp: each fragment of k and v is used twice. Narrow heads have few products, and
  // small problems few tiles.
  static constexpr int kM = kDim == 32 ? 1 : 2;
  static constexpr int kQueries = 16 * kM * kFlashWarps;
  static constexpr int kKeys = kDim == 32 ? 64 : 32;  // wider squares do not fit into registers
  static constexpr int kQBytes = kQueries * FlashRows<kDim>::kBytes;
  static constexpr int kKBytes = kKeys * FlashRows<kDim>::kBytes;
  static constexpr int kBytes = 2 * kQBytes + 4 * kKBytes;
};

// Block `block` of those that own queries, of which there are `blocks`.
template <class Tile>
__device__ __forceinline__ void QueryGradients(const FlashBackwardArgs& args, int block, int blocks,
                                               unsigned char* shared) {
  constexpr int kDim = Tile::kDim, kM = Tile::kM, kKeys = Tile::kKeys;
  const FlashProblem& p = args.p;
  const int head = block % p.heads, tile_index = block / p.heads;
  const int q_column = head * p.dim, kv_column = head / p.group * p.dim;
  if (!args.add_dq) ClearFlashPadding(p, args.dq, q_column, tile_index, blocks / p.heads);
  const FlashTile& tile =
      FindFlashTile(p.sequences, tile_index, Tile::kQueries, /*late_first=*/true);
  if (tile.length == 0) return;

  const std::uint32_t q_tile = mma::SharedAddress(shared), do_tile = q_tile + Tile::kQBytes,
                      k_tiles = do_tile + Tile::kQBytes, v_tiles = k_tiles + 2 * Tile::kKBytes;
  const auto copy_keys = [&](int key, int stage) {
    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kKBytes);
    CopyRows<kDim, kKeys>(args.k, tile.begin + key, kv_column, tile.length - key, p.dim,
                          k_tiles + at);
    CopyRows<kDim, kKeys>(args.v, tile.begin + key, kv_column, tile.length - key, p.dim,
                          v_tiles + at);
  };
  const int first = p.window == 0 ? 0 : max(0, tile.row - p.window + 1) / kKeys * kKeys;
  const int last = min(tile.length, tile.row + Tile::kQueries);
  CopyRows<kDim, Tile::kQueries>(args.q, tile.begin + tile.row, q_column, tile.length - tile.row,
                                 p.dim, q_tile);
  CopyRows<kDim, Tile::kQueries>(args.d_o, tile.begin + tile.row, q_column, tile.length - tile.row,
                                 p.dim, do_tile);
  copy_keys(first, first / kKeys % 2);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int query = tile.row + 16 * kM * warp;  // first of the warp
  const std::uint32_t lane_offset = FlashRows<kDim>::LaneOffset();
  const std::uint32_t own_rows =
      static_cast<std::uint32_t>(warp * kM * FlashRows<kDim>::kSubTile) + lane_offset;
  float lse[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query + 16 * m + 8 * half + lane / 4;
      const std::int64_t at = head * p.sequences.tokens + tile.begin + row;
      lse[m][half] = row < tile.length ? args.lse_log2[at] : 0.0f;
      delta[m][half] = row < tile.length ? args.delta[at] : 0.0f;
    }
  }

  FlashSums<kDim, kM> dq;
  dq.Clear();
  for (int key = first; key < last; key += kKeys) {
    const int stage = key / kKeys % 2;
    mma::WaitCopies();
    __syncthreads();  // shows this round's copies; what the round before read may be overwritten
    if (key + kKeys < last) copy_keys(key + kKeys, stage ^ 1);
    // Whether the warp has a query that sees a key of the tile.
    if (key > query + 16 * kM - 1 || query >= tile.length ||
        (p.window != 0 && key + kKeys - 1 <= query - p.window)) {
      continue;
    }
    const std::uint32_t at = static_cast<std::uint32_t>(stage * Tile::kKBytes) + lane_offset;
    float s[kM][kKeys / 8][4], ds[kM][kKeys / 8][4];
    MultiplyRows<kDim, kM, kKeys / 16>(q_tile + own_rows, k_tiles + at, s);
    MultiplyRows<kDim, kM, kKeys / 16>(do_tile + own_rows, v_tiles + at, ds);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = mma::Exp2(__fmaf_rn(s[m][n][i], p.scale_log2, -lse[m][i / 2]));
          ds[m][n][i] = x * (ds[m][n][i] - delta[m][i / 2]);
        }
      }
    }
    if (key + kKeys - 1 > query || (p.window != 0 && query + 16 * kM - 1 - key >= p.window)) {
      const int first_query = query + lane / 4, first_key = key + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int i_query = first_query + 16 * m + i / 2 * 8, i_key = first_key + 8 * n + i % 2;
            const bool visible = i_key <= i_query && (p.window == 0 || i_query - i_key < p.window);
            if (!visible || SeesOneKey(p.window, i_query)) ds[m][n][i] = 0.0f;
          }
        }
      }
    }
    PackedSquare<kM, kKeys / 16> square;
    square.Pack(ds);
    dq.Add(square, k_tiles + at);
  }
  float scale[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = p.scale;
  dq.Store(args.dq, tile.begin, q_column, query, tile.length, p.dim, scale, args.add_dq);
}

// --- both

template <int kDim>
struct FlashBackwardTiles {
  using Keys = FlashKeysTile<kDim>;
  using Queries = FlashQueriesTile<kDim>;
  static constexpr int kBytes = std::max(Keys::kBytes, Queries::kBytes);
  static constexpr int kBlocks = kDim == 128 ? 2 : 3;  // as many as registers leave
};

// Blocks that own keys come first: they are the longer ones, and those that own queries fill the
// multiprocessors that have no more of them, which counts where a problem is small.
template <int kDim>
__global__ void __launch_bounds__(kFlashThreads, FlashBackwardTiles<kDim>::kBlocks)
    attention_flash_gradients_kernel(const FlashBackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int block = static_cast<int>(blockIdx.x);
  if (block < args.key_blocks) {
    KeyGradients<typename FlashBackwardTiles<kDim>::Keys>(args, block, shared);
  } else {
    QueryGradients<typename FlashBackwardTiles<kDim>::Queries>(
        args, block - args.key_blocks, static_cast<int>(gridDim.x) - args.key_blocks, shared);
  }
}

template <int kDim>
void Launch(const Context& ctx, FlashBackwardArgs args) {
  constexpr std::int64_t kDeltaRows = kFlashThreads / (kDim / 8);
  const std::int64_t items = args.p.sequences.tokens * args.p.heads;
  attention_flash_delta_kernel<kDim><<<static_cast<unsigned>((items + kDeltaRows - 1) / kDeltaRows),
                                       kFlashThreads, 0, StreamOf(ctx)>>>(args);
  CheckLaunch("attention backward");

  using Tiles = FlashBackwardTiles<kDim>;
  const unsigned key_blocks = FlashBlocks(args.p.sequences, args.kv_heads, Tiles::Keys::kKeys);
  const unsigned query_blocks =
      FlashBlocks(args.p.sequences, args.p.heads, Tiles::Queries::kQueries);
  args.key_blocks = static_cast<int>(key_blocks);
  AllowSharedMemory(attention_flash_gradients_kernel<kDim>, Tiles::kBytes);
  attention_flash_gradients_kernel<kDim>
      <<<key_blocks + query_blocks, kFlashThreads, Tiles::kBytes, StreamOf(ctx)>>>(args);
  CheckLaunch("attention backward");
}

}  // namespace

void AttentionBackwardFlash(const Context& ctx, const AttentionConfig& config,
                            const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                            const Output& dq, const Output& dk, const Output& dv) {
  const std::int64_t tokens = q.dim(0), dim = config.head_dim;
  if (tokens == 0) return;
  const Tensor row_values = ctx.Empty({2, config.num_heads, tokens}, DType::kF32);
  FlashBackwardArgs args{};
  args.p = MakeFlashProblem(config, sequences, tokens);
  args.kv_heads = static_cast<int>(config.num_kv_heads);
  args.d_o = MakeHeadRows<const bf16>(d_o, dim);
  args.q = MakeHeadRows<const bf16>(q, dim);
  args.k = MakeHeadRows<const bf16>(k, dim);
  args.v = MakeHeadRows<const bf16>(v, dim);
  args.o = MakeHeadRows<const bf16>(o, dim);
  args.dq = MakeHeadRows<bf16>(dq.tensor, dim);
  args.dk = MakeHeadRows<bf16>(dk.tensor, dim);
  args.dv = MakeHeadRows<bf16>(dv.tensor, dim);
  args.lse = lse.data<float>();
  args.lse_log2 = row_values.data<float>();
  args.delta = args.lse_log2 + config.num_heads * tokens;
  args.add_dq = Accumulates(dq);
  args.add_dk = Accumulates(dk);
  args.add_dv = Accumulates(dv);
  DispatchFlashDim(dim, [&](auto width) { Launch<decltype(width)::value>(ctx, args); });
}

}  // namespace cistron::ops::internal
