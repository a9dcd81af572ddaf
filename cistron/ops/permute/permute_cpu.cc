// permute on the CPU: vector kernels over chunks of rows or tokens, every sum in one thread and in
// slot order.
#include "cistron/base/threads.h"
#include "cistron/ops/cpu_arguments.h"
#include "cistron/ops/permute/permute_impls.h"
#include "cistron/ops/permute/permute_rows.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kGrain = 1 << 14;  // elements a thread moves at least

std::int64_t RowsAThread(std::int64_t width) {
  return 1 + kGrain / (width + 1);
}

}  // namespace

Support PermuteCpuSupports(const PermuteProblem& p) {
  if (p.dtype == DType::kF32 || p.dtype == DType::kBF16) return Support::Yes();
  return Support::No(fmt::format("dtype {} is not one of f32, bf16", Name(p.dtype)));
}

void PermuteCpu(const Context&, const RowMap& map, const Tensor& x, const Output& rows) {
  DispatchVectorType(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PermuteArgs<T> args{map.slot_of_row.data<std::int32_t>(),
                              map.top_k,
                              x.data<T>(),
                              x.stride(0),
                              rows.tensor.data<T>(),
                              rows.tensor.stride(0),
                              x.dim(1),
                              Accumulates(rows)};
    ParallelChunks(
        RoutedRows(map), RowsAThread(args.width),
        [&](std::int64_t begin, std::int64_t end, int) { PermuteRange(args, begin, end); });
  });
}

void UnpermuteCpu(const Context&, const RowMap& map, const Tensor& rows, const Tensor& probs,
                  const Output& y) {
  DispatchVectorType(rows.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const UnpermuteArgs<T> args{map.row_of_slot.data<std::int32_t>(),
                                map.top_k,
                                rows.data<T>(),
                                rows.stride(0),
                                FloatsOrNull(probs),
                                y.tensor.data<T>(),
                                y.tensor.stride(0),
                                rows.dim(1),
                                Accumulates(y)};
    ParallelChunks(
        y.tensor.dim(0), RowsAThread(args.width * map.top_k),
        [&](std::int64_t begin, std::int64_t end, int) { UnpermuteRange(args, begin, end); });
  });
}

void UnpermuteBackwardCpu(const Context&, const RowMap& map, const Tensor& dy, const Tensor& rows,
                          const Tensor& probs, const Output& drows, const Output& dprobs) {
  DispatchVectorType(dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const UnpermuteBackwardArgs<T> args{map.row_of_slot.data<std::int32_t>(),
                                        map.top_k,
                                        dy.data<T>(),
                                        dprobs ? rows.data<T>() : nullptr,
                                        dy.stride(0),
                                        dprobs ? rows.stride(0) : 0,
                                        FloatsOrNull(probs),
                                        drows.tensor.data<T>(),
                                        drows.tensor.stride(0),
                                        FloatsOrNull(dprobs.tensor),
                                        dy.dim(1),
                                        Accumulates(drows),
                                        Accumulates(dprobs)};
    ParallelChunks(dy.dim(0), RowsAThread(args.width * map.top_k),
                   [&](std::int64_t begin, std::int64_t end, int) {
                     UnpermuteBackwardRange(args, begin, end);
                   });
  });
}

}  // namespace cistron::ops::internal
