// jitter on a GPU: a thread draws a Philox block and applies its four words.
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"
#include "cistron/ops/jitter/jitter_impls.h"

namespace cistron::ops {
namespace {

using internal::kJitterWords;
using internal::kThreads;
using internal::Value;

template <class T>
__device__ inline void Apply(T x, std::uint32_t word, Compute<T> amplitude, bool accumulate, T& y) {
  using C = Compute<T>;
  const C factor = C(1) + amplitude * internal::SignedJitter<C>(word);
  internal::StoreElement(y, Value(x) * factor, accumulate);
}

// Block b draws the words of elements 4·(first_block + b) … + 3 of the global batch, of which this
// tensor holds [first, end). `packs`: four elements of a block lie aligned.
template <class T>
__global__ void Scale(JitterConfig config, const std::int64_t* step, std::int64_t first,
                      std::int64_t end, bool packs, const T* x, T* y, bool accumulate) {
  constexpr int kWords = static_cast<int>(kJitterWords);
  using internal::Pack;
  const RandomStream stream = internal::JitterStream(config, *step);
  const auto amplitude = static_cast<Compute<T>>(config.amplitude);
  const std::int64_t first_block = first / kWords;
  const std::int64_t blocks = (end + kWords - 1) / kWords - first_block;
  for (std::int64_t b = internal::GridStart(); b < blocks; b += internal::GridStep()) {
    const PhiloxBlock words = stream.Block(static_cast<std::uint64_t>(first_block + b));
    const std::int64_t at = (first_block + b) * kWords;
    if (packs && at >= first && at + kWords <= end) {
      const Pack<T, kWords> in = internal::LoadPack<kWords>(x + (at - first));
      Pack<T, kWords> out;
      if (accumulate) out = internal::LoadPack<kWords>(y + (at - first));
#pragma unroll
      for (int k = 0; k < kWords; ++k) Apply(in.at[k], words[k], amplitude, accumulate, out.at[k]);
      internal::StorePack(out, y + (at - first));
      continue;
    }
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const std::int64_t i = at + k - first;
      if (at + k >= first && at + k < end) Apply(x[i], words[k], amplitude, accumulate, y[i]);
    }
  }
}

void JitterOnCuda(const Context& ctx, const JitterConfig& config, const Tensor& step,
                  const Tensor& x, const Output& y) {
  if (x.numel() == 0) return;
  DispatchFloat("jitter", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t first = config.first_token * x.dim(1);
    const std::int64_t blocks = x.numel() / kJitterWords + 2;  // at most
    constexpr std::uintptr_t kBytes = kJitterWords * sizeof(T);
    const auto starts = [](const Tensor& t) {
      return reinterpret_cast<std::uintptr_t>(t.raw()) % kBytes == 0;
    };
    const bool packs = first % kJitterWords == 0 && starts(x) && starts(y.tensor);
    Scale<<<internal::BlocksFor(blocks), kThreads, 0, internal::StreamOf(ctx)>>>(
        config, step.data<std::int64_t>(), first, first + x.numel(), packs, x.data<T>(),
        y.tensor.data<T>(), internal::Accumulates(y));
  });
  internal::CheckLaunch("jitter");
}

}  // namespace

extern constinit const JitterImpl kJitterCuda = {"cuda", internal::FloatsOnCuda<JitterProblem>,
                                                 JitterOnCuda, DeviceType::kCuda};

}  // namespace cistron::ops
