#include "cistron/ops/permute/permute.h"

#include "cistron/ops/op_work.h"
#include "cistron/ops/permute/permute_impls.h"

namespace cistron::ops {
namespace {

std::int64_t Tokens(const RowMap& map) {
  return map.row_of_slot.dim(0) / map.top_k;
}

void CheckMatrix(std::string_view op, const char* name, const Tensor& t) {
  CISTRON_CHECK(t && t.rank() == 2, "{}: {} is {}, expected a matrix", op, name, Describe(t));
  CISTRON_CHECK(t.dim(1) <= 1 || t.stride(1) == 1,
                "{}: the rows of {} are not contiguous: the last stride is {}", op, name,
                t.stride(1));
}

// Rows with an assignment, or 0 where the host cannot read the counts.
std::int64_t KnownRoutedRows(const RowMap& map) {
  return OnHost(map.split_sizes) ? internal::RoutedRows(map) : 0;
}

// x or y [T, H] and rows [M, H] that fit the map.
PermuteProblem CheckPair(std::string_view op, const RowMap& map, const char* token_name,
                         const Tensor& tokens, const char* rows_name, const Tensor& rows) {
  CheckMatrix(op, token_name, tokens);
  CheckMatrix(op, rows_name, rows);
  const std::int64_t routed = KnownRoutedRows(map);
  CISTRON_CHECK(tokens.dim(0) == Tokens(map) && tokens.dim(1) == rows.dim(1) &&
                    tokens.dtype() == rows.dtype() && rows.dim(0) >= routed,
                "{}: {} {} and {} {} do not fit a map of {} tokens with {} routed rows", op,
                token_name, Describe(tokens), rows_name, Describe(rows), Tokens(map), routed);
  return {tokens.dtype(), Tokens(map), map.top_k, tokens.dim(1)};
}

void CheckExperts(const Tensor& experts, std::int64_t num_experts) {
  const std::span<const std::int32_t> expert = experts.span<std::int32_t>();
  for (std::size_t s = 0; s < expert.size(); ++s) {
    const auto k = static_cast<std::size_t>(experts.dim(1));
    CISTRON_CHECK(expert[s] >= -1 && expert[s] < num_experts,
                  "row map: token {} slot {} names expert {}, outside [-1, {})", s / k, s % k,
                  expert[s], num_experts);
  }
}

void CheckSlots(std::string_view op, const char* name, const RowMap& map, const Tensor& t,
                DType dtype) {
  CISTRON_CHECK(t && t.rank() == 2 && t.dim(0) == Tokens(map) && t.dim(1) == map.top_k &&
                    t.dtype() == dtype && t.IsContiguous(),
                "{}: {} is {}, expected {} [{}, {}]", op, name, Describe(t), Name(dtype),
                Tokens(map), map.top_k);
}

const PermuteRun& Choose(const Context& ctx, const PermuteProblem& problem) {
  return Select(ctx, "permute", PermuteImpls(), problem);
}

// One value a slot and one a row, in the same floating dtype.
void CheckColumn(std::string_view op, const RowMap& map, const Tensor& slots, const Tensor& rows) {
  CISTRON_CHECK(slots && rows && IsFloat(slots.dtype()), "{}: slots {} and rows {} must be floats",
                op, Describe(slots), Describe(rows));
  CheckSlots(op, "slots", map, slots, slots.dtype());
  CISTRON_CHECK(rows.rank() == 1 && rows.IsContiguous() && rows.dtype() == slots.dtype() &&
                    rows.dim(0) >= KnownRoutedRows(map),
                "{}: rows is {}, expected {} with at least {} elements", op, Describe(rows),
                Name(slots.dtype()), KnownRoutedRows(map));
}

}  // namespace

namespace internal {
std::int64_t RoutedRows(const RowMap& map) {
  std::int64_t sum = 0;
  for (const std::int64_t n : map.split_sizes.span<std::int64_t>()) sum += n;
  return sum;
}
}  // namespace internal

RowMap BuildRowMap(const Context& ctx, const Tensor& experts, std::int64_t num_experts) {
  CISTRON_CHECK(
      experts && experts.rank() == 2 && experts.dtype() == DType::kI32 && experts.IsContiguous(),
      "row map: experts is {}, expected i32 [T, K]", Describe(experts));
  CISTRON_CHECK(num_experts >= 1 && experts.dim(1) >= 1,
                "row map: {} experts, top-{}: both must be at least 1", num_experts,
                experts.dim(1));
  const std::int64_t slots = experts.numel();
  CISTRON_CHECK(slots < (std::int64_t{1} << 31), "row map: {} assignments exceed 2^31 - 1", slots);
  if (OnHost(experts)) CheckExperts(experts, num_experts);
  return Choose(ctx, {DType::kF32, experts.dim(0), experts.dim(1), 1})
      .build_row_map(ctx, experts, num_experts);
}

void Permute(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows) {
  const PermuteProblem problem = CheckPair("permute", map, "x", x, "rows", rows.tensor);
  AnnounceWork(ctx, 0, x, rows);
  Choose(ctx, problem).permute(ctx, map, x, rows);
}

void Unpermute(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
               const Output& y) {
  const PermuteProblem problem = CheckPair("unpermute", map, "y", y.tensor, "rows", rows);
  if (probs) CheckSlots("unpermute", "probs", map, probs, ComputeType(problem.dtype));
  AnnounceWork(ctx, 0, rows, y);
  Choose(ctx, problem).unpermute(ctx, map, rows, probs, y);
}

void UnpermuteBackward(const Context& ctx, const RowMap& map, const Tensor& dy, const Tensor& rows,
                       const Tensor& probs, const Output& drows, const Output& dprobs) {
  constexpr std::string_view kOp = "unpermute backward";
  const PermuteProblem problem = CheckPair(kOp, map, "dy", dy, "drows", drows.tensor);
  const DType compute = ComputeType(problem.dtype);
  if (probs) CheckSlots(kOp, "probs", map, probs, compute);
  if (dprobs) {
    CheckPair(kOp, map, "dy", dy, "rows", rows);
    CheckSlots(kOp, "dprobs", map, dprobs.tensor, compute);
  }
  AnnounceWork(ctx, 0, dy, rows, drows);
  Choose(ctx, problem).unpermute_backward(ctx, map, dy, rows, probs, drows, dprobs);
}

void PermuteSlots(const Context& ctx, const RowMap& map, const Tensor& slots, const Output& rows) {
  CheckColumn("permute slots", map, slots, rows.tensor);
  Choose(ctx, {slots.dtype(), Tokens(map), map.top_k, 1}).permute_slots(ctx, map, slots, rows);
}

void UnpermuteSlots(const Context& ctx, const RowMap& map, const Tensor& rows,
                    const Output& slots) {
  CheckColumn("unpermute slots", map, slots.tensor, rows);
  Choose(ctx, {rows.dtype(), Tokens(map), map.top_k, 1}).unpermute_slots(ctx, map, rows, slots);
}

std::span<const PermuteImpl> PermuteImpls() {
  static const PermuteImpl list[] = {
      kPermuteCuda,
      {"cpu",
       internal::PermuteCpuSupports,
       {internal::BuildRowMapHost, internal::PermuteCpu, internal::UnpermuteCpu,
        internal::UnpermuteBackwardCpu, internal::PermuteSlotsHost, internal::UnpermuteSlotsHost}},
      {"ref",
       internal::PermuteRefSupports,
       {internal::BuildRowMapHost, internal::PermuteRef, internal::UnpermuteRef,
        internal::UnpermuteBackwardRef, internal::PermuteSlotsHost, internal::UnpermuteSlotsHost}},
  };
  return list;
}

}  // namespace cistron::ops
