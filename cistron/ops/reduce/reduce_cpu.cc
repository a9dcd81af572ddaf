// reduce on the CPU: vectors within a block, threads over blocks.
//
// A block is summed in 16 lanes whatever the width of the machine's vectors: element i goes to lane
// i mod 16, and the lanes are added in order at the end. So the bits depend neither on the number
// of threads nor on the instruction set.
#include <algorithm>

#include "cistron/base/threads.h"
#include "cistron/ops/reduce/reduce_impls.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistron/ops/reduce/reduce_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cistron/ops/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistron::ops {
namespace HWY_NAMESPACE {
namespace {

using DoubleTag = hn::ScalableTag<double>;
using DoubleVec = hn::Vec<DoubleTag>;
constexpr std::int64_t kSumLanes = 16;
constexpr std::int64_t kDoubleLanes = static_cast<std::int64_t>(hn::MaxLanes(DoubleTag()));
constexpr std::int64_t kAccumulators = kSumLanes / kDoubleLanes;

// As many f32 as there are lanes of f64.
using HalfTag = hn::Rebind<float, DoubleTag>;

HWY_INLINE hn::Vec<HalfTag> LoadHalf(const float* from) {
  return hn::LoadU(HalfTag(), from);
}
HWY_INLINE hn::Vec<HalfTag> LoadHalf(const bf16* from) {
  const hn::RebindToUnsigned<HalfTag> du;
  const hn::Rebind<std::uint16_t, HalfTag> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(HalfTag(), hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

template <class T>
HWY_INLINE DoubleVec LoadDouble(const T* from) {
  return hn::PromoteTo(DoubleTag(), LoadHalf(from));
}
HWY_INLINE DoubleVec LoadDouble(const double* from) {
  return hn::LoadU(DoubleTag(), from);
}

// The square in the compute type, as f64.
template <class T>
HWY_INLINE DoubleVec LoadSquare(const T* from) {
  const auto value = LoadHalf(from);
  return hn::PromoteTo(DoubleTag(), hn::Mul(value, value));
}
HWY_INLINE DoubleVec LoadSquare(const double* from) {
  const DoubleVec value = LoadDouble(from);
  return hn::Mul(value, value);
}

// Σ term(i) for i in [0, n), n a multiple of kSumLanes, added to the lanes in `sums`.
template <class F>
HWY_INLINE void SumLanes(std::int64_t n, double* sums, F&& term) {
  const DoubleTag d;
  DoubleVec lanes[kAccumulators];
  for (std::int64_t a = 0; a < kAccumulators; ++a) lanes[a] = hn::LoadU(d, sums + a * kDoubleLanes);
  for (std::int64_t i = 0; i < n; i += kSumLanes) {
    for (std::int64_t a = 0; a < kAccumulators; ++a) {
      lanes[a] = hn::Add(lanes[a], term(i + a * kDoubleLanes));
    }
  }
  for (std::int64_t a = 0; a < kAccumulators; ++a) hn::StoreU(lanes[a], d, sums + a * kDoubleLanes);
}

HWY_INLINE double AddLanes(const double* sums) {
  double total = 0;
  for (std::int64_t i = 0; i < kSumLanes; ++i) total += sums[i];
  return total;
}

template <class T>
double SquaresOfBlock(const T* x, std::int64_t n) {
  double sums[kSumLanes] = {};
  const std::int64_t whole = n / kSumLanes * kSumLanes;
  SumLanes(whole, sums, [&](std::int64_t i) { return LoadSquare(x + i); });
  if (whole < n) {
    T rest[kSumLanes] = {};  // zeros add nothing
    std::copy(x + whole, x + n, rest);
    SumLanes(kSumLanes, sums, [&](std::int64_t i) { return LoadSquare(rest + i); });
  }
  return AddLanes(sums);
}

template <class T, class W>
double ProductsOfBlock(const T* x, const W* w, std::int64_t n) {
  double sums[kSumLanes] = {};
  const std::int64_t whole = n / kSumLanes * kSumLanes;
  SumLanes(whole, sums,
           [&](std::int64_t i) { return hn::Mul(LoadDouble(x + i), LoadDouble(w + i)); });
  if (whole < n) {
    T rest_x[kSumLanes] = {};
    W rest_w[kSumLanes] = {};
    std::copy(x + whole, x + n, rest_x);
    std::copy(w + whole, w + n, rest_w);
    SumLanes(kSumLanes, sums, [&](std::int64_t i) {
      return hn::Mul(LoadDouble(rest_x + i), LoadDouble(rest_w + i));
    });
  }
  return AddLanes(sums);
}

template <class T>
double ValuesOfBlock(const T* x, std::int64_t n) {
  double sums[kSumLanes] = {};
  const std::int64_t whole = n / kSumLanes * kSumLanes;
  SumLanes(whole, sums, [&](std::int64_t i) { return LoadDouble(x + i); });
  if (whole < n) {
    T rest[kSumLanes] = {};
    std::copy(x + whole, x + n, rest);
    SumLanes(kSumLanes, sums, [&](std::int64_t i) { return LoadDouble(rest + i); });
  }
  return AddLanes(sums);
}

double BlockSquares(const Tensor& x, std::int64_t begin, std::int64_t n) {
  return DispatchFloat("SumOfSquares", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return SquaresOfBlock(x.data<T>() + begin, n);
  });
}

double BlockWeighted(const Tensor& x, const Tensor& weights, std::int64_t begin, std::int64_t n) {
  return DispatchFloat("WeightedSum", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* values = x.data<T>() + begin;
    if (!weights) return ValuesOfBlock(values, n);
    if (weights.dtype() == DType::kF32) {
      return ProductsOfBlock(values, weights.data<float>() + begin, n);
    }
    return ProductsOfBlock(values, weights.data<double>() + begin, n);
  });
}

template <class T>
void AddRange(const T* x, T* y, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    StoreFloat(hn::Add(LoadFloat(y + i), LoadFloat(x + i)), y + i);
  for (; i < n; ++i) y[i] = T(static_cast<float>(y[i]) + static_cast<float>(x[i]));
}
void AddRange(const double* x, double* y, std::int64_t n) {
  const DoubleTag d;
  std::int64_t i = 0;
  for (; i + kDoubleLanes <= n; i += kDoubleLanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  }
  for (; i < n; ++i) y[i] += x[i];
}

void AddBlock(const Tensor& x, const Tensor& y, std::int64_t begin, std::int64_t n) {
  DispatchFloat("AddTo", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    AddRange(x.data<T>() + begin, y.data<T>() + begin, n);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace cistron::ops
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistron::ops {
namespace {

HWY_EXPORT(BlockSquares);
HWY_EXPORT(BlockWeighted);
HWY_EXPORT(AddBlock);

// Below this a loop is not worth a second thread.
constexpr std::int64_t kGrain = std::int64_t{1} << 16;

template <class F>
double SumBlocks(const Context& ctx, std::int64_t n, F&& block_sum) {
  const std::int64_t blocks = (n + kReduceBlock - 1) / kReduceBlock;
  if (blocks == 1) return block_sum(0, n);
  const Tensor sums = ctx.Empty({blocks}, DType::kF64);
  double* partial = sums.data<double>();
  ParallelFor(blocks, kGrain / kReduceBlock, [&](std::int64_t b) {
    const std::int64_t begin = b * kReduceBlock;
    partial[b] = block_sum(begin, std::min(kReduceBlock, n - begin));
  });
  double total = 0;
  for (std::int64_t b = 0; b < blocks; ++b) total += partial[b];
  return total;
}

Support SupportsReduce(const ReduceProblem& problem) {
  if (problem.dtype != DType::kF64 && problem.dtype != DType::kF32 &&
      problem.dtype != DType::kBF16) {
    return Support::No("only f64, f32 and bf16");
  }
  return Support::Yes();
}

void SumOfSquaresCpu(const Context& ctx, const Tensor& x, const Output& out) {
  StoreScalar(out, SumBlocks(ctx, x.numel(), [&](std::int64_t begin, std::int64_t n) {
                return HWY_DYNAMIC_DISPATCH(BlockSquares)(x, begin, n);
              }));
}

void WeightedSumCpu(const Context& ctx, const Tensor& x, const Tensor& weights, const Output& out) {
  StoreScalar(out, SumBlocks(ctx, x.numel(), [&](std::int64_t begin, std::int64_t n) {
                return HWY_DYNAMIC_DISPATCH(BlockWeighted)(x, weights, begin, n);
              }));
}

void AddToCpu(const Context&, const Tensor& x, const Tensor& y) {
  ParallelChunks(x.numel(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(AddBlock)(x, y, begin, end - begin);
  });
}

}  // namespace

constinit const ReduceImpl kReduceCpu = {"cpu",
                                         SupportsReduce,
                                         {SumOfSquaresCpu, WeightedSumCpu, AddToCpu, ClipFactorHost,
                                          SumOfSquaresOfAllHost, GateUpdateHost}};

}  // namespace cistron::ops
#endif  // HWY_ONCE
