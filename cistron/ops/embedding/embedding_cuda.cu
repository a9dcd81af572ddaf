// embedding on a GPU. Backward lists the positions of each token in order, a block a token, and
// then gives every (row of the table, stripe of columns) to one block, whose threads add a column
// each in the order of the list: no atomics, and the bits of the reference.
#include <limits>

#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/embedding/embedding_impls.h"

namespace cistron::ops {
namespace {

using internal::CheckLaunch;
using internal::kThreads;
using internal::LoadPack;
using internal::Pack;
using internal::RowGrid;
using internal::StreamOf;
using internal::Value;

template <class T, int N>
__global__ void Forward(std::int64_t rows, std::int64_t vocab, std::int64_t width,
                        const std::int64_t* tokens, const T* w, T* y, bool accumulate) {
  const std::int64_t row = internal::RowOfThread();
  if (row >= rows) return;
  const std::int64_t token = tokens[row];
  const bool known = token >= 0 && token < vocab;
  Pack<T, N> unknown;
  for (T& v : unknown.at) {
    v = internal::Rounded<T>(std::numeric_limits<Compute<T>>::quiet_NaN());
  }
  const T* from = known ? w + token * width : nullptr;
  T* to = y + row * width;
  for (std::int64_t j = threadIdx.x * N; j < width; j += blockDim.x * N) {
    const Pack<T, N> pack = known ? LoadPack<N>(from + j) : unknown;
    if (accumulate) {
      Compute<T> values[N];
      for (int i = 0; i < N; ++i) values[i] = Value(pack.at[i]);
      internal::StoreValues<N>(values, true, to + j);
    } else {
      StorePack(pack, to + j);
    }
  }
}

// Block v writes first[v], count[v], and the positions of token v to order[first[v] …), ascending.
__global__ void ListPositions(std::int64_t n, const std::int64_t* tokens, std::int64_t* first,
                              std::int64_t* count, std::int64_t* order) {
  constexpr int kWarps = kThreads / 32;
  __shared__ std::int64_t scratch[33];
  __shared__ int found[kWarps];
  const std::int64_t v = blockIdx.x;
  std::int64_t below = 0, equal = 0;
  for (std::int64_t t = threadIdx.x; t < n; t += kThreads) {
    const std::int64_t token = tokens[t];
    below += token >= 0 && token < v;
    equal += token == v;
  }
  below = internal::BlockSum(below, scratch);
  equal = internal::BlockSum(equal, scratch);
  if (threadIdx.x == 0) {
    first[v] = below;
    count[v] = equal;
  }
  if (equal == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t next = below;
  for (std::int64_t begin = 0; begin < n; begin += kThreads) {
    const std::int64_t t = begin + threadIdx.x;
    const bool mine = t < n && tokens[t] == v;
    const unsigned ballot = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) found[warp] = __popc(ballot);
    __syncthreads();
    std::int64_t slot = next + __popc(ballot & ((1u << lane) - 1));
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) slot += found[i];
      next += found[i];
    }
    if (mine) order[slot] = t;
    __syncthreads();
  }
}

constexpr int kStripe = 64;  // columns of a block

template <class T>
__global__ void SumRows(std::int64_t width, const std::int64_t* first, const std::int64_t* count,
                        const std::int64_t* order, const T* dy, Compute<T>* dw, bool accumulate) {
  const std::int64_t v = blockIdx.x;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kStripe + threadIdx.x;
  if (column >= width) return;
  const std::int64_t n = count[v];
  const std::int64_t* positions = order + first[v];
  dy += column;
  constexpr int kAhead = 16;  // rows asked for together: a sum in order waits for memory otherwise
  Compute<T> sum = 0;
  std::int64_t i = 0;
  for (; i + kAhead <= n; i += kAhead) {
    T values[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) values[k] = dy[positions[i + k] * width];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) sum += Value(values[k]);
  }
  for (; i < n; ++i) sum += Value(dy[positions[i] * width]);
  internal::StoreElement(dw[v * width + column], sum, accumulate);
}

void ForwardCuda(const Context& ctx, const Tensor& tokens, const Tensor& w, const Output& y) {
  const std::int64_t rows = tokens.numel(), width = w.dim(1);
  if (rows == 0 || width == 0) return;
  DispatchFloat("embedding", w.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool packs = width % internal::kPack<T> == 0 && internal::TakesPacks(w) &&
                       internal::TakesPacks(y.tensor);
    internal::DispatchPack<T>(packs, [&](auto pack) {
      constexpr int kN = decltype(pack)::value;
      const RowGrid grid(rows, width / kN);
      Forward<T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(
          rows, w.dim(0), width, tokens.data<std::int64_t>(), w.data<T>(), y.tensor.data<T>(),
          internal::Accumulates(y));
    });
  });
  CheckLaunch("embedding");
}

void BackwardCuda(const Context& ctx, const Tensor& tokens, const Tensor& dy, const Output& dw) {
  const std::int64_t vocab = dw.tensor.dim(0), width = dw.tensor.dim(1);
  if (vocab == 0 || width == 0) return;
  const Tensor first = ctx.Empty({vocab}, DType::kI64), count = ctx.Empty({vocab}, DType::kI64);
  const Tensor order = ctx.Empty({tokens.numel()}, DType::kI64);
  const auto blocks = static_cast<unsigned>(vocab);
  ListPositions<<<blocks, kThreads, 0, StreamOf(ctx)>>>(
      tokens.numel(), tokens.data<std::int64_t>(), first.data<std::int64_t>(),
      count.data<std::int64_t>(), order.data<std::int64_t>());
  const dim3 grid(blocks, static_cast<unsigned>((width + kStripe - 1) / kStripe));
  DispatchFloat("embedding", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    SumRows<<<grid, kStripe, 0, StreamOf(ctx)>>>(
        width, first.data<std::int64_t>(), count.data<std::int64_t>(), order.data<std::int64_t>(),
        dy.data<T>(), dw.tensor.data<Compute<T>>(), internal::Accumulates(dw));
  });
  CheckLaunch("embedding");
}

}  // namespace

extern constinit const EmbeddingImpl kEmbeddingCuda = {"cuda",
                                                       internal::FloatsOnCuda<EmbeddingProblem>,
                                                       {ForwardCuda, BackwardCuda},
                                                       DeviceType::kCuda};

}  // namespace cistron::ops
