#include "cistron/comm/reduce.h"

#include <algorithm>
#include <array>
#include <type_traits>

namespace cistron::comm {
namespace {

// Sums of i64 as unsigned: signed overflow would be undefined.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, std::int64_t>, std::uint64_t, Compute<T>>;

template <class T>
struct Sum {
  using A = Accumulator<T>;
  static A Combine(A a, A b) { return a + b; }
};
template <class T>
struct Max {
  using A = std::conditional_t<std::is_same_v<T, std::int64_t>, std::int64_t, Compute<T>>;
  // b where it is NaN; a NaN in a stays, since nothing is larger.
  static A Combine(A a, A b) { return b > a || b != b ? b : a; }
};
template <class T>
struct Min {
  using A = std::conditional_t<std::is_same_v<T, std::int64_t>, std::int64_t, Compute<T>>;
  static A Combine(A a, A b) { return b < a || b != b ? b : a; }
};

// In chunks whose accumulators stay in the first-level cache: each source is read once.
template <class T, class Op>
void Reduce(std::span<const std::byte* const> sources, std::int64_t count, std::byte* out) {
  using A = typename Op::A;
  constexpr std::int64_t kChunk = 1024;
  std::array<A, kChunk> sums;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, count - begin);
    const T* first = reinterpret_cast<const T*>(sources[0]) + begin;
    for (std::int64_t i = 0; i < n; ++i)
      sums[static_cast<std::size_t>(i)] = static_cast<A>(first[i]);
    for (const std::byte* source : sources.subspan(1)) {
      const T* next = reinterpret_cast<const T*>(source) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        A& sum = sums[static_cast<std::size_t>(i)];
        sum = Op::Combine(sum, static_cast<A>(next[i]));
      }
    }
    T* to = reinterpret_cast<T*>(out) + begin;
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(sums[static_cast<std::size_t>(i)]);
  }
}

template <class T>
void ReduceTyped(ReduceOp reduce, std::span<const std::byte* const> sources, std::int64_t count,
                 std::byte* out) {
  switch (reduce) {
    case ReduceOp::kSum: return Reduce<T, Sum<T>>(sources, count, out);
    case ReduceOp::kMax: return Reduce<T, Max<T>>(sources, count, out);
    case ReduceOp::kMin: return Reduce<T, Min<T>>(sources, count, out);
  }
}

}  // namespace

bool CanReduce(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16 ||
         dtype == DType::kI64;
}

void ReduceInOrder(ReduceOp reduce, DType dtype, std::span<const std::byte* const> sources,
                   std::int64_t count, std::byte* out) {
  if (dtype == DType::kI64) return ReduceTyped<std::int64_t>(reduce, sources, count, out);
  DispatchFloat("comm: reduction", dtype, [&](auto tag) {
    ReduceTyped<typename decltype(tag)::type>(reduce, sources, count, out);
  });
}

}  // namespace cistron::comm
