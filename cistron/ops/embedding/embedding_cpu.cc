// embedding on the CPU. Backward sorts the positions by token (a stable counting sort) and gives
// every (row of the table, stripe of columns) to one thread, which adds its positions in order: no
// atomics, and even a vocabulary of four used tokens keeps many threads busy.
#include <algorithm>
#include <cstring>

#include "cistron/base/threads.h"
#include "cistron/ops/embedding/embedding_impls.h"

namespace cistron::ops {
namespace {

constexpr std::int64_t kStripe = 64;  // columns summed together: they stay in registers or L1

Support SupportsEmbedding(const EmbeddingProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

template <class T>
void Forward(const Tensor& tokens, const Tensor& w, const Output& y) {
  const std::int64_t width = w.dim(1);
  const std::int64_t* token = tokens.data<std::int64_t>();
  const T* table = w.data<T>();
  T* out = y.tensor.data<T>();
  const bool accumulate = y.mode == WriteMode::kAccumulate;
  ParallelFor(tokens.numel(), 256, [&](std::int64_t t) {
    const T* from = table + token[t] * width;
    T* to = out + t * width;
    if (!accumulate) {
      std::copy_n(from, width, to);
      return;
    }
    for (std::int64_t h = 0; h < width; ++h) to[h] = T(Compute<T>(to[h]) + Compute<T>(from[h]));
  });
}

// Positions of each token, in order: those of token v are order[first[v] … first[v + 1]).
struct Positions {
  Tensor first, order;

  Positions(const Context& ctx, const Tensor& tokens, std::int64_t vocab)
      : first(ctx.Zeros({vocab + 1}, DType::kI64)),
        order(ctx.Empty({tokens.numel()}, DType::kI64)) {
    const std::span<const std::int64_t> token = tokens.span<std::int64_t>();
    const std::span<std::int64_t> start = first.span<std::int64_t>();
    for (const std::int64_t v : token) ++start[static_cast<std::size_t>(v) + 1];
    for (std::size_t v = 1; v < start.size(); ++v) start[v] += start[v - 1];
    const Tensor next = first.Clone();
    for (std::size_t t = 0; t < token.size(); ++t) {
      std::int64_t& slot = next.data<std::int64_t>()[token[t]];
      order.data<std::int64_t>()[slot++] = static_cast<std::int64_t>(t);
    }
  }
};

template <class T>
void Backward(const Context& ctx, const Tensor& tokens, const Tensor& dy, const Output& dw) {
  using C = Compute<T>;
  const std::int64_t vocab = dw.tensor.dim(0), width = dw.tensor.dim(1);
  const Positions positions(ctx, tokens, vocab);
  const std::int64_t* first = positions.first.data<std::int64_t>();
  const std::int64_t* order = positions.order.data<std::int64_t>();
  const T* gradient = dy.data<T>();
  C* out = dw.tensor.data<C>();
  const bool accumulate = dw.mode == WriteMode::kAccumulate;

  if (!accumulate) {
    ParallelFor(vocab, 64, [&](std::int64_t v) {
      if (first[v] == first[v + 1]) std::fill_n(out + v * width, width, C(0));
    });
  }
  std::vector<std::int64_t> used;
  for (std::int64_t v = 0; v < vocab; ++v) {
    if (first[v] != first[v + 1]) used.push_back(v);
  }
  const std::int64_t stripes = (width + kStripe - 1) / kStripe;
  ParallelDynamic(static_cast<std::int64_t>(used.size()) * stripes, [&](std::int64_t item) {
    const std::int64_t v = used[static_cast<std::size_t>(item / stripes)];
    const std::int64_t column = item % stripes * kStripe;
    const std::int64_t columns = std::min(kStripe, width - column);
    C sums[kStripe] = {};
    for (std::int64_t i = first[v]; i < first[v + 1]; ++i) {
      const T* row = gradient + order[i] * width + column;
      for (std::int64_t h = 0; h < columns; ++h) sums[h] += C(row[h]);
    }
    C* to = out + v * width + column;
    for (std::int64_t h = 0; h < columns; ++h) to[h] = accumulate ? to[h] + sums[h] : sums[h];
  });
}

void ForwardCpu(const Context&, const Tensor& tokens, const Tensor& w, const Output& y) {
  DispatchFloat("embedding", w.dtype(),
                [&](auto tag) { Forward<typename decltype(tag)::type>(tokens, w, y); });
}

void BackwardCpu(const Context& ctx, const Tensor& tokens, const Tensor& dy, const Output& dw) {
  DispatchFloat("embedding", dy.dtype(),
                [&](auto tag) { Backward<typename decltype(tag)::type>(ctx, tokens, dy, dw); });
}

}  // namespace

constinit const EmbeddingImpl kEmbeddingCpu = {"cpu", SupportsEmbedding, {ForwardCpu, BackwardCpu}};

}  // namespace cistron::ops
