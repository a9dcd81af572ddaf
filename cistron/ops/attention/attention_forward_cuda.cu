// Forward of attention on a GPU: a block a tile of queries of one head, which goes through the
// tiles of keys with a running maximum and sum (online softmax).
#include "cistron/ops/attention/attention_cuda.h"
#include "cistron/ops/attention/attention_impls.h"
#include "cistron/ops/attention/attention_supports_cuda.h"
#include "cistron/ops/attention/attention_tile.cuh"

namespace cistron::ops {
namespace internal {
namespace {

template <class T>
struct ForwardArgs {
  using C = Compute<T>;
  SequenceRows sequences;
  const std::int64_t* first_tile;
  HeadRows<const T> q, k, v;
  HeadRows<T> o;
  C* lse;              // [Hq, T] or null
  std::int64_t group;  // query heads of a key/value head
  std::int64_t window;
  int dim;
  C scale;
  bool accumulate;
};

// The state of the softmax of a thread's rows.
template <class Tile, class C>
struct OnlineSoftmax {
  C largest[Tile::kPer], total[Tile::kPer];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      largest[i] = C(-INFINITY);
      total[i] = C(0);
    }
  }
  // Turns scores of row i into probabilities relative to the largest score so far; returns the
  // factor of what was summed before. Keys that are not visible get exactly 0.
  __device__ C Step(int i, C (&scores)[Tile::kPer], const bool (&visible)[Tile::kPer]) {
    C tile_largest = C(-INFINITY);
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      if (visible[j]) tile_largest = max(tile_largest, scores[j]);
    }
    const C before = largest[i];
    largest[i] = max(before, RowMax(tile_largest));
    // Nothing was visible yet, or only NaN, which stays in the sums.
    const C factor = largest[i] == C(-INFINITY) ? C(1) : exp(before - largest[i]);
    C sum = 0;
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) {
      scores[j] = visible[j] ? exp(scores[j] - largest[i]) : C(0);
      sum += scores[j];
    }
    total[i] = total[i] * factor + RowSum(sum);
    return factor;
  }
};

template <class Tile, class T>
__global__ void __launch_bounds__(kThreads) attention_forward_kernel(ForwardArgs<T> args) {
  using C = Compute<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  C* q_tile = reinterpret_cast<C*>(shared);
  C* kv_tile = q_tile + Tile::kRows * Tile::kPitch;
  C* p_tile = kv_tile + Tile::kRows * Tile::kPitch;

  const SequenceTile tile = FindTile(args.sequences, args.first_tile, Tile::kRows);
  if (tile.begin >= tile.end) return;
  const std::int64_t head = blockIdx.y, rows = tile.end - tile.row;
  const std::int64_t q_column = head * args.dim, kv_column = head / args.group * args.dim;
  LoadHeadTile<Tile, T>(args.q, tile.row, q_column, rows, args.dim, q_tile);

  HeadSums<Tile, C> sums;
  OnlineSoftmax<Tile, C> softmax;
  sums.Clear();
  softmax.Clear();
  // Tiles of keys begin where those of queries do.
  const std::int64_t first = FirstKey(args.window, tile.begin, tile.row) - tile.begin;
  const std::int64_t last = min(tile.end, tile.row + Tile::kRows);
  for (std::int64_t key = tile.begin + first / Tile::kRows * Tile::kRows; key < last;
       key += Tile::kRows) {
    const std::int64_t keys = tile.end - key;
    __syncthreads();  // v of the round before has been read
    LoadHeadTile<Tile, T>(args.k, key, kv_column, keys, args.dim, kv_tile);
    __syncthreads();
    C scores[Tile::kPer][Tile::kPer];
    TileDots<Tile>(q_tile, kv_tile, args.dim, scores);
    __syncthreads();  // k has been read
    LoadHeadTile<Tile, T>(args.v, key, kv_column, keys, args.dim, kv_tile);
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      const std::int64_t query = tile.row + OwnRow<Tile>(i);
      const std::int64_t first_key = FirstKey(args.window, tile.begin, query);
      bool visible[Tile::kPer];
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        const std::int64_t own = key + OwnColumn(j);
        visible[j] = own <= query && own >= first_key && query < tile.end;
        scores[i][j] *= args.scale;
      }
      const C factor = softmax.Step(i, scores[i], visible);
#pragma unroll
      for (int n = 0; n < Tile::kParts * Tile::kVec; ++n) sums.v[i][n] *= factor;
    }
    StoreSquare<Tile>(p_tile, scores);
    __syncthreads();
    sums.Add(p_tile, kv_tile, static_cast<int>(min(keys, std::int64_t{Tile::kRows})));
  }
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
    for (int n = 0; n < Tile::kParts * Tile::kVec; ++n) sums.v[i][n] /= softmax.total[i];
    const std::int64_t row = OwnRow<Tile>(i);
    if (args.lse != nullptr && TileX() == 0 && row < rows) {
      args.lse[head * args.sequences.tokens + tile.row + row] =
          softmax.largest[i] + log(softmax.total[i]);
    }
  }
  sums.Store(args.o, tile.row, q_column, rows, args.dim, args.accumulate);
}

template <class C>
__global__ void clear_lse_padding_kernel(SequenceRows sequences, std::int64_t heads, C* lse) {
  const std::int64_t used =
      max(std::int64_t{0}, min(sequences.cu_seqlens[sequences.number], sequences.tokens));
  const std::int64_t padding = sequences.tokens - used;
  for (std::int64_t i = GridStart(); i < heads * padding; i += GridStep()) {
    lse[i / padding * sequences.tokens + used + i % padding] = C(0);
  }
}

template <class T>
void ForwardTyped(const Context& ctx, const AttentionConfig& config,
                  const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                  const Tensor& v, const Tensor& lse, const Output& o) {
  using C = Compute<T>;
  ForwardArgs<T> args{};
  args.sequences = {sequences.cu_seqlens.data<std::int64_t>(), sequences.num_sequences(), q.dim(0)};
  if (args.sequences.tokens == 0) return;
  args.q = MakeHeadRows<const T>(q, config.head_dim);
  args.k = MakeHeadRows<const T>(k, config.head_dim);
  args.v = MakeHeadRows<const T>(v, config.head_dim);
  args.o = MakeHeadRows<T>(o.tensor, config.head_dim);
  args.lse = DataOrNull<C>(lse);
  args.group = config.num_heads / config.num_kv_heads;
  args.window = config.window;
  args.dim = static_cast<int>(config.head_dim);
  args.scale = C(1) / std::sqrt(static_cast<C>(config.head_dim));
  args.accumulate = Accumulates(o);
  DispatchHeadDim<T>(config.head_dim, [&](auto tile) {
    using Tile = decltype(tile);
    const TileTable table = MakeTileTable(ctx, args.sequences, Tile::kRows);
    args.first_tile = table.first_tile.template data<std::int64_t>();
    constexpr std::size_t kBytes = 2 * Tile::kTileBytes + Tile::kSquareBytes;
    AllowSharedMemory(attention_forward_kernel<Tile, T>, kBytes);
    attention_forward_kernel<Tile, T>
        <<<dim3(static_cast<unsigned>(table.blocks), static_cast<unsigned>(config.num_heads)),
           kThreads, kBytes, StreamOf(ctx)>>>(args);
    CheckLaunch("attention forward");
  });
  ClearPadding<T>(ctx, args.sequences, o);
  if (lse) {
    clear_lse_padding_kernel<<<64, kThreads, 0, StreamOf(ctx)>>>(args.sequences, config.num_heads,
                                                                 args.lse);
    CheckLaunch("attention forward");
  }
}

}  // namespace

void AttentionForwardCuda(const Context& ctx, const AttentionConfig& config,
                          const PackedSequences& sequences, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& lse, const Output& o) {
  DispatchFloat("attention", q.dtype(), [&](auto tag) {
    ForwardTyped<typename decltype(tag)::type>(ctx, config, sequences, q, k, v, lse, o);
  });
}

}  // namespace internal

extern constinit const AttentionImpl kAttentionCuda = {
    "cuda",
    internal::AttentionCudaSupports,
    {internal::AttentionForwardCuda, internal::AttentionBackwardCuda},
    DeviceType::kCuda};

}  // namespace cistron::ops
