// Scalar reference of attention: one row of scores at a time, so memory grows with S, not S².
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/attention/attention_impls.h"

namespace cistron::ops {
namespace {

template <class T>
T* Row(const Tensor& t, std::int64_t row, std::int64_t column) {
  return t.data<T>() + row * t.stride(0) + column;
}

template <class T>
void Store(T& to, Compute<T> value, WriteMode mode) {
  to = T(mode == WriteMode::kAccumulate ? static_cast<Compute<T>>(to) + value : value);
}

template <class T>
Compute<T> Dot(const T* a, const T* b, std::int64_t n) {
  Compute<T> sum = 0;
  for (std::int64_t d = 0; d < n; ++d) {
    sum += static_cast<Compute<T>>(a[d]) * static_cast<Compute<T>>(b[d]);
  }
  return sum;
}

// Zeros in the rows of an output beyond the last sequence; Accumulate leaves them.
template <class T>
void ClearPadding(const Output& out, std::int64_t used) {
  if (out.mode == WriteMode::kAccumulate) return;
  for (std::int64_t t = used; t < out.tensor.dim(0); ++t) {
    std::fill_n(Row<T>(out.tensor, t, 0), out.tensor.dim(1), T(0));
  }
}

// First key that query i of a sequence that starts at `begin` sees.
std::int64_t FirstKey(const AttentionConfig& c, std::int64_t begin, std::int64_t i) {
  return c.window == 0 ? begin : std::max(begin, i - c.window + 1);
}

template <class T>
void ForwardTyped(const AttentionConfig& c, const PackedSequences& sequences, const Tensor& q,
                  const Tensor& k, const Tensor& v, const Tensor& lse, const Output& o) {
  using C = Compute<T>;
  const std::int64_t* cu = sequences.cu_seqlens.data<std::int64_t>();
  const std::int64_t num_sequences = sequences.num_sequences();
  const std::int64_t tokens = q.dim(0);
  const std::int64_t dim = c.head_dim;
  const std::int64_t group = c.num_heads / c.num_kv_heads;
  const C scale = C(1) / std::sqrt(static_cast<C>(dim));

  ParallelDynamic(num_sequences * c.num_heads, [&](std::int64_t task) {
    const std::int64_t begin = cu[task / c.num_heads], end = cu[task / c.num_heads + 1];
    const std::int64_t h = task % c.num_heads;
    const std::int64_t q_column = h * dim, kv_column = h / group * dim;
    std::vector<C> p(static_cast<std::size_t>(end - begin));
    std::vector<C> sum(static_cast<std::size_t>(dim));
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = FirstKey(c, begin, i);
      const std::size_t keys = static_cast<std::size_t>(i - first + 1);
      C largest = -std::numeric_limits<C>::infinity();
      for (std::size_t j = 0; j < keys; ++j) {
        p[j] = scale * Dot(Row<T>(q, i, q_column),
                           Row<T>(k, first + static_cast<std::int64_t>(j), kv_column), dim);
        largest = std::max(largest, p[j]);
      }
      C total = 0;
      for (std::size_t j = 0; j < keys; ++j) total += p[j] = std::exp(p[j] - largest);
      std::fill(sum.begin(), sum.end(), C(0));
      for (std::size_t j = 0; j < keys; ++j) {
        const T* row = Row<T>(v, first + static_cast<std::int64_t>(j), kv_column);
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += p[j] * static_cast<C>(row[d]);
      }
      T* out = Row<T>(o.tensor, i, q_column);
      for (std::size_t d = 0; d < sum.size(); ++d) Store(out[d], sum[d] / total, o.mode);
      if (lse) lse.data<C>()[h * tokens + i] = largest + std::log(total);
    }
  });

  const std::int64_t used = cu[num_sequences];
  ClearPadding<T>(o, used);
  for (std::int64_t h = 0; lse && h < c.num_heads; ++h) {
    std::fill_n(lse.data<C>() + h * tokens + used, tokens - used, C(0));
  }
}

template <class T>
void BackwardTyped(const AttentionConfig& c, const PackedSequences& sequences, const Tensor& d_o,
                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                   const Tensor& lse, const Output& dq, const Output& dk, const Output& dv) {
  using C = Compute<T>;
  const std::int64_t* cu = sequences.cu_seqlens.data<std::int64_t>();
  const std::int64_t num_sequences = sequences.num_sequences();
  const std::int64_t tokens = q.dim(0);
  const std::int64_t dim = c.head_dim;
  const std::size_t width = static_cast<std::size_t>(dim);
  const std::int64_t group = c.num_heads / c.num_kv_heads;
  const C scale = C(1) / std::sqrt(static_cast<C>(dim));

  // A task owns one key/value head of one sequence: it sums over the query heads that read it.
  ParallelDynamic(num_sequences * c.num_kv_heads, [&](std::int64_t task) {
    const std::int64_t begin = cu[task / c.num_kv_heads], end = cu[task / c.num_kv_heads + 1];
    const std::int64_t kv_column = task % c.num_kv_heads * dim;
    std::vector<C> dk_sum(static_cast<std::size_t>(end - begin) * width);
    std::vector<C> dv_sum(static_cast<std::size_t>(end - begin) * width);
    std::vector<C> dq_sum(width);
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t h = task % c.num_kv_heads * group + g;
      const std::int64_t q_column = h * dim;
      for (std::int64_t i = begin; i < end; ++i) {
        const T* q_row = Row<T>(q, i, q_column);
        const T* do_row = Row<T>(d_o, i, q_column);
        const C delta = Dot(do_row, Row<T>(o, i, q_column), dim);
        const C row_lse = lse.data<C>()[h * tokens + i];
        std::fill(dq_sum.begin(), dq_sum.end(), C(0));
        for (std::int64_t j = FirstKey(c, begin, i); j <= i; ++j) {
          const T* k_row = Row<T>(k, j, kv_column);
          const C p = std::exp(scale * Dot(q_row, k_row, dim) - row_lse);
          const C ds = scale * p * (Dot(do_row, Row<T>(v, j, kv_column), dim) - delta);
          C* dk_row = dk_sum.data() + static_cast<std::size_t>(j - begin) * width;
          C* dv_row = dv_sum.data() + static_cast<std::size_t>(j - begin) * width;
          for (std::size_t d = 0; d < width; ++d) {
            dq_sum[d] += ds * static_cast<C>(k_row[d]);
            dk_row[d] += ds * static_cast<C>(q_row[d]);
            dv_row[d] += p * static_cast<C>(do_row[d]);
          }
        }
        T* dq_row = Row<T>(dq.tensor, i, q_column);
        for (std::size_t d = 0; d < width; ++d) Store(dq_row[d], dq_sum[d], dq.mode);
      }
    }
    for (std::int64_t j = begin; j < end; ++j) {
      T* dk_row = Row<T>(dk.tensor, j, kv_column);
      T* dv_row = Row<T>(dv.tensor, j, kv_column);
      for (std::size_t d = 0; d < width; ++d) {
        const std::size_t from = static_cast<std::size_t>(j - begin) * width + d;
        Store(dk_row[d], dk_sum[from], dk.mode);
        Store(dv_row[d], dv_sum[from], dv.mode);
      }
    }
  });

  for (const Output* out : {&dq, &dk, &dv}) ClearPadding<T>(*out, cu[num_sequences]);
}

Support Supports(const AttentionProblem& problem) {
  if (problem.dtype == DType::kF64 || problem.dtype == DType::kF32 ||
      problem.dtype == DType::kBF16) {
    return Support::Yes();
  }
  return Support::No(fmt::format("dtype {} is not one of f64, f32, bf16", Name(problem.dtype)));
}

void Forward(const Context&, const AttentionConfig& config, const PackedSequences& sequences,
             const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
             const Output& o) {
  DispatchFloat("attention", q.dtype(), [&](auto tag) {
    ForwardTyped<typename decltype(tag)::type>(config, sequences, q, k, v, lse, o);
  });
}

void Backward(const Context&, const AttentionConfig& config, const PackedSequences& sequences,
              const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
              const Tensor& lse, const Output& dq, const Output& dk, const Output& dv) {
  DispatchFloat("attention", q.dtype(), [&](auto tag) {
    BackwardTyped<typename decltype(tag)::type>(config, sequences, d_o, q, k, v, o, lse, dq, dk,
                                                dv);
  });
}

}  // namespace

AttentionImpl RefAttention() {
  return {"ref", Supports, {Forward, Backward}};
}

}  // namespace cistron::ops
