// rope on a GPU: a warp takes a token, so that its angles are read from the caches by all heads.
#include <limits>

#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/rope/rope_impls.h"

namespace cistron::ops {
namespace {

using internal::LoadPack;
using internal::Pack;
using internal::Value;

constexpr int kWarp = 32;

// N pairs at a time.
template <class T, int N>
__global__ void RotateRows(std::int64_t tokens, std::int64_t width, std::int64_t head_dim,
                           std::int64_t known, const Compute<T>* table,
                           const std::int64_t* positions, bool inverse, T* x, std::int64_t stride) {
  using C = Compute<T>;
  const std::int64_t token = internal::RowOfThread();
  if (token >= tokens) return;
  const std::int64_t position = positions[token];
  const bool in_table = position >= 0 && position < known;
  const C* angles = in_table ? table + position * head_dim : nullptr;
  const std::int64_t half = head_dim / 2;
  T* row = x + token * stride;
  for (std::int64_t pair = threadIdx.x * N; pair < width / 2; pair += kWarp * N) {
    const std::int64_t head = pair / half, i = pair - head * half;
    T* low = row + head * head_dim + i;
    T* high = low + half;
    const Pack<T, N> a = LoadPack<N>(low), b = LoadPack<N>(high);
    C to_low[N], to_high[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const C nan = std::numeric_limits<C>::quiet_NaN();
      const C cosine = in_table ? angles[2 * (i + k)] : nan;
      const C sine = in_table ? angles[2 * (i + k) + 1] : nan;
      const C signed_sine = inverse ? -sine : sine;
      to_low[k] = Value(a.at[k]) * cosine - Value(b.at[k]) * signed_sine;
      to_high[k] = Value(b.at[k]) * cosine + Value(a.at[k]) * signed_sine;
    }
    internal::StoreValues<N>(to_low, false, low);
    internal::StoreValues<N>(to_high, false, high);
  }
}

void RotateCuda(const Context& ctx, const Tensor& table, const Tensor& positions,
                std::int64_t head_dim, bool inverse, const Tensor& x) {
  const std::int64_t tokens = x.dim(0), width = x.dim(1);
  if (tokens == 0 || width == 0) return;
  constexpr unsigned kRows = internal::kThreads / kWarp;
  const auto blocks = static_cast<unsigned>((tokens + kRows - 1) / kRows);
  DispatchFloat("rope", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool packs = head_dim / 2 % internal::kPack<T> == 0 && internal::TakesPacks(x);
    internal::DispatchPack<T>(packs, [&](auto pack) {
      RotateRows<T, decltype(pack)::value>
          <<<blocks, dim3(kWarp, kRows), 0, internal::StreamOf(ctx)>>>(
              tokens, width, head_dim, table.dim(0), table.data<Compute<T>>(),
              positions.data<std::int64_t>(), inverse, x.data<T>(), x.stride(0));
    });
  });
  internal::CheckLaunch("rope");
}

}  // namespace

RopeImpl CudaRope() {
  return {"cuda", internal::FloatsOnCuda<RopeProblem>, {RotateCuda}, DeviceType::kCuda};
}

}  // namespace cistron::ops
