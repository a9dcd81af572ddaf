// Backward of attention on a GPU, in three kernels: row sums of do·o; dq, a block a tile of
// queries; dk and dv, a block a tile of keys, which goes through the query heads of its group in
// order. All recompute probabilities from lse. Nothing is added by two blocks to one place.
#include "cistron/ops/attention/attention_cuda.h"
#include "cistron/ops/attention/attention_tile.cuh"

namespace cistron::ops::internal {
namespace {

template <class T>
struct BackwardArgs {
  using C = Compute<T>;
  SequenceRows sequences;
  const std::int64_t* first_tile;
  HeadRows<const T> d_o, q, k, v, o;
  HeadRows<T> dq, dk, dv;
  const C* lse;  // [Hq, T]
  C* delta;      // [Hq, T]: row sums of do·o
  std::int64_t heads, group, window;
  int dim;
  C scale;
  bool add_dq, add_dk, add_dv;
};

// The same sum, in the same order, as that of do·v in a tile: where a query sees one key, o is v,
// and the two cancel exactly. A thread a row.
template <class T>
__global__ void attention_delta_kernel(BackwardArgs<T> args) {
  using C = Compute<T>;
  const std::int64_t tokens = args.sequences.tokens;
  const std::int64_t used =
      max(std::int64_t{0}, min(args.sequences.cu_seqlens[args.sequences.number], tokens));
  for (std::int64_t i = GridStart(); i < used * args.heads; i += GridStep()) {
    const std::int64_t row = i / args.heads, head = i % args.heads;
    const T* d_o = args.d_o.At(row, head * args.dim);
    const T* o = args.o.At(row, head * args.dim);
    C sum = 0;
    for (int d = 0; d < args.dim; ++d) sum = Fma(Value(d_o[d]), Value(o[d]), sum);
    args.delta[head * tokens + row] = sum;
  }
}

template <class C>
__device__ C ScoreGradient(C scale, C p, C dp, C delta) {
  return scale * p * (dp - delta);
}

template <class Tile, class T>
__global__ void __launch_bounds__(kThreads) attention_dq_kernel(BackwardArgs<T> args) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kTile = Tile::kRows * Tile::kPitch;
  C* q_tile = reinterpret_cast<C*>(shared);
  C *do_tile = q_tile + kTile, *k_tile = do_tile + kTile, *v_tile = k_tile + kTile;
  C* ds_tile = v_tile + kTile;

  const SequenceTile tile = FindTile(args.sequences, args.first_tile, Tile::kRows);
  if (tile.begin >= tile.end) return;
  const std::int64_t head = blockIdx.y, rows = tile.end - tile.row;
  const std::int64_t q_column = head * args.dim, kv_column = head / args.group * args.dim;
  LoadHeadTile<Tile, T>(args.q, tile.row, q_column, rows, args.dim, q_tile);
  LoadHeadTile<Tile, T>(args.d_o, tile.row, q_column, rows, args.dim, do_tile);
  C lse[Tile::kPer], delta[Tile::kPer];
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    const std::int64_t at = head * args.sequences.tokens + tile.row + OwnRow<Tile>(i);
    const bool inside = OwnRow<Tile>(i) < rows;
    lse[i] = inside ? args.lse[at] : C(0);
    delta[i] = inside ? args.delta[at] : C(0);
  }

  HeadSums<Tile, C> sums;
  sums.Clear();
  const std::int64_t first = FirstKey(args.window, tile.begin, tile.row) - tile.begin;
  const std::int64_t last = min(tile.end, tile.row + Tile::kRows);
  for (std::int64_t key = tile.begin + first / Tile::kRows * Tile::kRows; key < last;
       key += Tile::kRows) {
    const std::int64_t keys = tile.end - key;
    __syncthreads();  // k and ds of the round before have been read
    LoadHeadTile<Tile, T>(args.k, key, kv_column, keys, args.dim, k_tile);
    LoadHeadTile<Tile, T>(args.v, key, kv_column, keys, args.dim, v_tile);
    __syncthreads();
    C scores[Tile::kPer][Tile::kPer], dp[Tile::kPer][Tile::kPer];
    TileDots<Tile>(q_tile, k_tile, args.dim, scores);
    TileDots<Tile>(do_tile, v_tile, args.dim, dp);
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      const std::int64_t query = tile.row + OwnRow<Tile>(i);
      const std::int64_t first_key = FirstKey(args.window, tile.begin, query);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const std::int64_t own = key + OwnColumn(j);
        const bool visible = own <= query && own >= first_key && query < tile.end;
        const C p = exp(args.scale * scores[i][j] - lse[i]);
        dp[i][j] = visible ? ScoreGradient(args.scale, p, dp[i][j], delta[i]) : C(0);
      }
    }
    StoreSquare<Tile>(ds_tile, dp);
    __syncthreads();
    sums.Add(ds_tile, k_tile, static_cast<int>(min(keys, std::int64_t{Tile::kRows})));
  }
  sums.Store(args.dq, tile.row, q_column, rows, args.dim, args.add_dq);
}

// Rows of the square tiles are keys here, columns are queries.
template <class Tile, class T>
__global__ void __launch_bounds__(kThreads) attention_dkv_kernel(BackwardArgs<T> args) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kTile = Tile::kRows * Tile::kPitch;
  C* k_tile = reinterpret_cast<C*>(shared);
  C *v_tile = k_tile + kTile, *q_tile = v_tile + kTile, *do_tile = q_tile + kTile;
  C* square = do_tile + kTile;  // probabilities, then gradients of scores

  const SequenceTile tile = FindTile(args.sequences, args.first_tile, Tile::kRows);
  if (tile.begin >= tile.end) return;
  const std::int64_t kv_head = blockIdx.y, keys = tile.end - tile.row;
  const std::int64_t kv_column = kv_head * args.dim;
  LoadHeadTile<Tile, T>(args.k, tile.row, kv_column, keys, args.dim, k_tile);
  LoadHeadTile<Tile, T>(args.v, tile.row, kv_column, keys, args.dim, v_tile);

  HeadSums<Tile, C> dk, dv;
  dk.Clear();
  dv.Clear();
  // The last query that sees a key of the tile is its last key's, a window later.
  const std::int64_t last =
      args.window == 0 ? tile.end
                       : min(tile.end, min(tile.end, tile.row + Tile::kRows) - 1 + args.window);
  for (std::int64_t head = kv_head * args.group; head < (kv_head + 1) * args.group; ++head) {
    const std::int64_t q_column = head * args.dim;
    for (std::int64_t row = tile.row; row < last; row += Tile::kRows) {
      const std::int64_t rows = tile.end - row;
      const int count = static_cast<int>(min(rows, std::int64_t{Tile::kRows}));
      __syncthreads();  // what the round before loaded has been read
      LoadHeadTile<Tile, T>(args.q, row, q_column, rows, args.dim, q_tile);
      LoadHeadTile<Tile, T>(args.d_o, row, q_column, rows, args.dim, do_tile);
      __syncthreads();
      C p[Tile::kPer][Tile::kPer], ds[Tile::kPer][Tile::kPer];
      TileDots<Tile>(k_tile, q_tile, args.dim, p);
      TileDots<Tile>(v_tile, do_tile, args.dim, ds);
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const std::int64_t query = row + OwnColumn(j);
        const std::int64_t first_key = FirstKey(args.window, tile.begin, query);
        const bool inside = query < tile.end;
        const std::int64_t at = head * args.sequences.tokens + query;
        const C lse = inside ? args.lse[at] : C(0), delta = inside ? args.delta[at] : C(0);
#pragma unroll
        for (int i = 0; i < Tile::kPer; ++i) {
          const std::int64_t key = tile.row + OwnRow<Tile>(i);
          const bool visible = inside && key <= query && key >= first_key;
          p[i][j] = visible ? exp(args.scale * p[i][j] - lse) : C(0);
          ds[i][j] = visible ? ScoreGradient(args.scale, p[i][j], ds[i][j], delta) : C(0);
        }
      }
      StoreSquare<Tile>(square, p);
      __syncthreads();
      dv.Add(square, do_tile, count);
      __syncthreads();
      StoreSquare<Tile>(square, ds);
      __syncthreads();
      dk.Add(square, q_tile, count);
    }
  }
  dk.Store(args.dk, tile.row, kv_column, keys, args.dim, args.add_dk);
  dv.Store(args.dv, tile.row, kv_column, keys, args.dim, args.add_dv);
}

template <class Tile, class T>
void Launch(const Context& ctx, const AttentionConfig& config, BackwardArgs<T> args) {
  const TileTable table = MakeTileTable(ctx, args.sequences, Tile::kRows);
  args.first_tile = table.first_tile.template data<std::int64_t>();
  constexpr std::size_t kBytes = 4 * Tile::kTileBytes + Tile::kSquareBytes;
  const auto blocks = static_cast<unsigned>(table.blocks);
  AllowSharedMemory(attention_dq_kernel<Tile, T>, kBytes);
  attention_dq_kernel<Tile, T>
      <<<dim3(blocks, static_cast<unsigned>(config.num_heads)), kThreads, kBytes, StreamOf(ctx)>>>(
          args);
  CheckLaunch("attention backward");
  AllowSharedMemory(attention_dkv_kernel<Tile, T>, kBytes);
  attention_dkv_kernel<Tile, T><<<dim3(blocks, static_cast<unsigned>(config.num_kv_heads)),
                                  kThreads, kBytes, StreamOf(ctx)>>>(args);
  CheckLaunch("attention backward");
}

template <class T>
void BackwardTyped(const Context& ctx, const AttentionConfig& config,
                   const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                   const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                   const Output& dq, const Output& dk, const Output& dv) {
  using C = Compute<T>;
  const std::int64_t tokens = q.dim(0), dim = config.head_dim;
  if (tokens == 0) return;
  const Tensor delta = ctx.Empty({config.num_heads, tokens}, ComputeType(q.dtype()));
  BackwardArgs<T> args{};
  args.sequences = {sequences.cu_seqlens.data<std::int64_t>(), sequences.num_sequences(), tokens};
  args.d_o = MakeHeadRows<const T>(d_o, dim);
  args.q = MakeHeadRows<const T>(q, dim);
  args.k = MakeHeadRows<const T>(k, dim);
  args.v = MakeHeadRows<const T>(v, dim);
  args.o = MakeHeadRows<const T>(o, dim);
  args.dq = MakeHeadRows<T>(dq.tensor, dim);
  args.dk = MakeHeadRows<T>(dk.tensor, dim);
  args.dv = MakeHeadRows<T>(dv.tensor, dim);
  args.lse = lse.data<C>();
  args.delta = delta.data<C>();
  args.heads = config.num_heads;
  args.group = config.num_heads / config.num_kv_heads;
  args.window = config.window;
  args.dim = static_cast<int>(dim);
  args.scale = C(1) / std::sqrt(static_cast<C>(dim));
  args.add_dq = Accumulates(dq);
  args.add_dk = Accumulates(dk);
  args.add_dv = Accumulates(dv);
  attention_delta_kernel<T>
      <<<BlocksFor(tokens * config.num_heads), kThreads, 0, StreamOf(ctx)>>>(args);
  CheckLaunch("attention backward");
  DispatchHeadDim<T>(dim, [&](auto tile) { Launch<decltype(tile), T>(ctx, config, args); });
  for (const Output* out : {&dq, &dk, &dv}) ClearPadding<T>(ctx, args.sequences, *out);
}

}  // namespace

void AttentionBackwardCuda(const Context& ctx, const AttentionConfig& config,
                           const PackedSequences& sequences, const Tensor& d_o, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                           const Output& dq, const Output& dk, const Output& dv) {
  DispatchFloat("attention", q.dtype(), [&](auto tag) {
    BackwardTyped<typename decltype(tag)::type>(ctx, config, sequences, d_o, q, k, v, o, lse, dq,
                                                dk, dv);
  });
}

}  // namespace cistron::ops::internal
