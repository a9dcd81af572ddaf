// grouped_bias: a bias a group (expert), times one factor a row.
//
//   Forward   y[r] += s[r] · bias[e]                         r in group e; s = 1 where undefined
//   Backward  dbias[e] (= or +=) Σ_r s[r]·dy[r];  ds[r] (= or +=) ⟨dy[r], bias[e]⟩
//
// Shapes: y, dy [M, N]; bias [E, N]; dbias [E, N] compute type; s, ds [M] compute type.
// Dtypes: y, dy, bias alike: f64, f32, bf16. Sums run in a fixed order, in the compute type.
// Rows beyond Σ split_sizes are neither read nor written; an empty group's dbias is zeros in Write.
// Counts on a device are read there, and clamped to the rows there are.
#pragma once

#include "cistron/ops/context.h"
#include "cistron/ops/implementation.h"

namespace cistron::ops {

void GroupedBiasForward(const Context& ctx, const Tensor& bias, const Tensor& row_scale,
                        const Tensor& split_sizes, const Tensor& y);
// Undefined outputs are not computed.
void GroupedBiasBackward(const Context& ctx, const Tensor& dy, const Tensor& bias,
                         const Tensor& row_scale, const Tensor& split_sizes, const Output& dbias,
                         const Output& drow_scale);

struct GroupedBiasProblem {
  DType dtype;
  std::int64_t groups, rows, width;
};
struct GroupedBiasRun {
  void (*forward)(const Context&, const Tensor& bias, const Tensor& row_scale,
                  const Tensor& split_sizes, const Tensor& y);
  void (*backward)(const Context&, const Tensor& dy, const Tensor& bias, const Tensor& row_scale,
                   const Tensor& split_sizes, const Output& dbias, const Output& drow_scale);
};
using GroupedBiasImpl = Implementation<GroupedBiasProblem, GroupedBiasRun>;
std::span<const GroupedBiasImpl> GroupedBiasImpls();

}  // namespace cistron::ops
