// grouped_bias: checks, choice, and its one implementation on the CPU. Plain loops over contiguous
// rows, which the compiler vectorises: the op moves few bytes beside the product that it follows.
#include "cistron/ops/grouped_bias/grouped_bias.h"

#include <vector>

#include "cistron/base/threads.h"
#include "cistron/ops/check_tensor.h"
#include "cistron/ops/grouped_bias/grouped_bias_impls.h"
#include "cistron/ops/split_sizes.h"

namespace cistron::ops {
namespace {

template <class C>
C ScaleOf(const Tensor& row_scale, std::int64_t row) {
  return row_scale ? row_scale.data<C>()[row] : C(1);
}

template <class T>
void ForwardTyped(const Tensor& bias, const Tensor& row_scale,
                  std::span<const std::int64_t> offsets, const Tensor& y) {
  using C = Compute<T>;
  const std::int64_t width = y.dim(1);
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const T* const b = bias.data<T>() + static_cast<std::int64_t>(e) * width;
    ParallelFor(offsets[e + 1] - offsets[e], 64, [&](std::int64_t i) {
      const std::int64_t row = offsets[e] + i;
      const C s = ScaleOf<C>(row_scale, row);
      T* const to = y.data<T>() + row * width;
      for (std::int64_t j = 0; j < width; ++j) {
        to[j] = T(static_cast<C>(to[j]) + s * static_cast<C>(b[j]));
      }
    });
  }
}

template <class T>
void BackwardTyped(const Tensor& dy, const Tensor& bias, const Tensor& row_scale,
                   std::span<const std::int64_t> offsets, const Output& dbias,
                   const Output& drow_scale) {
  using C = Compute<T>;
  const std::int64_t width = dy.dim(1);
  ParallelFor(static_cast<std::int64_t>(offsets.size()) - 1, 1, [&](std::int64_t e) {
    const auto group = static_cast<std::size_t>(e);
    const T* const b = bias.data<T>() + e * width;
    std::vector<C> sum(static_cast<std::size_t>(width));
    for (std::int64_t row = offsets[group]; row < offsets[group + 1]; ++row) {
      const T* const from = dy.data<T>() + row * width;
      const C s = ScaleOf<C>(row_scale, row);
      C dot = 0;
      for (std::int64_t j = 0; j < width; ++j) {
        const C d = static_cast<C>(from[j]);
        sum[static_cast<std::size_t>(j)] += s * d;
        dot += d * static_cast<C>(b[j]);
      }
      if (drow_scale) {
        C& to = drow_scale.tensor.data<C>()[row];
        to = drow_scale.mode == WriteMode::kAccumulate ? to + dot : dot;
      }
    }
    if (!dbias) return;
    C* const to = dbias.tensor.data<C>() + e * width;
    for (std::int64_t j = 0; j < width; ++j) {
      const C value = sum[static_cast<std::size_t>(j)];
      to[j] = dbias.mode == WriteMode::kAccumulate ? to[j] + value : value;
    }
  });
}

void RunForward(const Context&, const Tensor& bias, const Tensor& row_scale,
                const Tensor& split_sizes, const Tensor& y) {
  const auto offsets = RowOffsets("grouped_bias", split_sizes, y.dim(0));
  DispatchFloat("grouped_bias", y.dtype(), [&](auto tag) {
    ForwardTyped<typename decltype(tag)::type>(bias, row_scale, offsets, y);
  });
}
void RunBackward(const Context&, const Tensor& dy, const Tensor& bias, const Tensor& row_scale,
                 const Tensor& split_sizes, const Output& dbias, const Output& drow_scale) {
  const auto offsets = RowOffsets("grouped_bias", split_sizes, dy.dim(0));
  DispatchFloat("grouped_bias", dy.dtype(), [&](auto tag) {
    BackwardTyped<typename decltype(tag)::type>(dy, bias, row_scale, offsets, dbias, drow_scale);
  });
}

Support Supports(const GroupedBiasProblem& p) {
  const bool ok = p.dtype == DType::kF64 || p.dtype == DType::kF32 || p.dtype == DType::kBF16;
  return ok ? Support::Yes() : Support::No(fmt::format("dtype {}", Name(p.dtype)));
}

// Checks what both directions share.
void Check(const Tensor& rows, const Tensor& bias, const Tensor& row_scale,
           const Tensor& split_sizes) {
  CISTRON_CHECK(rows && rows.rank() == 2 && rows.IsContiguous() && bias && bias.rank() == 2,
                "grouped_bias: the rows are {} and the bias {}; expected contiguous [M, N] and "
                "[E, N]",
                Describe(rows), Describe(bias));
  CheckSplitSizes("grouped_bias", split_sizes, rows.dim(0));
  CheckTensor("grouped_bias", "bias", bias, {split_sizes.dim(0), rows.dim(1)}, rows.dtype());
  if (row_scale) {
    CheckTensor("grouped_bias", "row_scale", row_scale, {rows.dim(0)}, ComputeType(rows.dtype()));
  }
}

const GroupedBiasRun& Choose(const Context& ctx, const Tensor& rows, const Tensor& bias) {
  return Select(ctx, "grouped_bias", GroupedBiasImpls(),
                GroupedBiasProblem{rows.dtype(), bias.dim(0), rows.dim(0), rows.dim(1)});
}

}  // namespace

std::span<const GroupedBiasImpl> GroupedBiasImpls() {
  static const GroupedBiasImpl list[] = {kGroupedBiasCuda,
                                         {"ref", Supports, {RunForward, RunBackward}}};
  return list;
}

void GroupedBiasForward(const Context& ctx, const Tensor& bias, const Tensor& row_scale,
                        const Tensor& split_sizes, const Tensor& y) {
  Check(y, bias, row_scale, split_sizes);
  Choose(ctx, y, bias).forward(ctx, bias, row_scale, split_sizes, y);
}

void GroupedBiasBackward(const Context& ctx, const Tensor& dy, const Tensor& bias,
                         const Tensor& row_scale, const Tensor& split_sizes, const Output& dbias,
                         const Output& drow_scale) {
  Check(dy, bias, row_scale, split_sizes);
  const DType compute = ComputeType(dy.dtype());
  if (dbias) CheckTensor("grouped_bias", "dbias", dbias.tensor, bias.shape(), compute);
  if (drow_scale) {
    CheckTensor("grouped_bias", "drow_scale", drow_scale.tensor, {dy.dim(0)}, compute);
  }
  Choose(ctx, dy, bias).backward(ctx, dy, bias, row_scale, split_sizes, dbias, drow_scale);
}

}  // namespace cistron::ops
