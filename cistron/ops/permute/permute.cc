#include "cistron/ops/permute/permute.h"

#include "cistron/ops/permute/permute_impls.h"

namespace cistron::ops {
namespace {

constexpr PermuteImpl kImpls[] = {
    {"cpu",
     internal::PermuteCpuSupports,
     {internal::PermuteCpu, internal::UnpermuteCpu, internal::UnpermuteBackwardCpu}},
    {"ref",
     internal::PermuteRefSupports,
     {internal::PermuteRef, internal::UnpermuteRef, internal::UnpermuteBackwardRef}},
};

std::int64_t Tokens(const RowMap& map) {
  return map.row_of_slot.dim(0) / map.top_k;
}

void CheckMatrix(std::string_view op, const char* name, const Tensor& t) {
  CISTRON_CHECK(t && t.rank() == 2, "{}: {} is {}, expected a matrix", op, name, Describe(t));
  CISTRON_CHECK(t.dim(1) <= 1 || t.stride(1) == 1,
                "{}: the rows of {} are not contiguous: the last stride is {}", op, name,
                t.stride(1));
}

// x or y [T, H] and rows [M, H] that fit the map.
PermuteProblem CheckPair(std::string_view op, const RowMap& map, const char* token_name,
                         const Tensor& tokens, const char* rows_name, const Tensor& rows) {
  CheckMatrix(op, token_name, tokens);
  CheckMatrix(op, rows_name, rows);
  const std::int64_t routed = internal::RoutedRows(map);
  CISTRON_CHECK(tokens.dim(0) == Tokens(map) && tokens.dim(1) == rows.dim(1) &&
                    tokens.dtype() == rows.dtype() && rows.dim(0) >= routed,
                "{}: {} {} and {} {} do not fit a map of {} tokens with {} routed rows", op,
                token_name, Describe(tokens), rows_name, Describe(rows), Tokens(map), routed);
  return {tokens.dtype(), Tokens(map), map.top_k, tokens.dim(1)};
}

void CheckSlots(std::string_view op, const char* name, const RowMap& map, const Tensor& t,
                DType dtype) {
  CISTRON_CHECK(t && t.rank() == 2 && t.dim(0) == Tokens(map) && t.dim(1) == map.top_k &&
                    t.dtype() == dtype && t.IsContiguous(),
                "{}: {} is {}, expected {} [{}, {}]", op, name, Describe(t), Name(dtype),
                Tokens(map), map.top_k);
}

const PermuteRun& Choose(const Context& ctx, const PermuteProblem& problem) {
  return Select<PermuteProblem, PermuteRun>(ctx, "permute", kImpls, problem);
}

// One value a slot and one a row, in the same floating dtype.
void CheckColumn(std::string_view op, const RowMap& map, const Tensor& slots, const Tensor& rows) {
  CISTRON_CHECK(slots && rows && IsFloat(slots.dtype()), "{}: slots {} and rows {} must be floats",
                op, Describe(slots), Describe(rows));
  CheckSlots(op, "slots", map, slots, slots.dtype());
  CISTRON_CHECK(rows.rank() == 1 && rows.IsContiguous() && rows.dtype() == slots.dtype() &&
                    rows.dim(0) >= internal::RoutedRows(map),
                "{}: rows is {}, expected {} with at least {} elements", op, Describe(rows),
                Name(slots.dtype()), internal::RoutedRows(map));
}

template <class T>
void Store(T& out, T value, WriteMode mode) {
  using C = Compute<T>;
  out = mode == WriteMode::kAccumulate ? static_cast<T>(static_cast<C>(out) + static_cast<C>(value))
                                       : value;
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
  CISTRON_CHECK(experts && experts.rank() == 2 && experts.dtype() == DType::kI32,
                "row map: experts is {}, expected i32 [T, K]", Describe(experts));
  CISTRON_CHECK(num_experts >= 1 && experts.dim(1) >= 1,
                "row map: {} experts, top-{}: both must be at least 1", num_experts,
                experts.dim(1));
  const std::int64_t slots = experts.numel();
  CISTRON_CHECK(slots < (std::int64_t{1} << 31), "row map: {} assignments exceed 2^31 - 1", slots);
  RowMap map{ctx.Zeros({num_experts}, DType::kI64), ctx.Empty({slots}, DType::kI32),
             ctx.Empty({slots}, DType::kI32), experts.dim(1)};
  const std::int32_t* expert = experts.span<std::int32_t>().data();
  std::int64_t* counts = map.split_sizes.data<std::int64_t>();
  for (std::int64_t s = 0; s < slots; ++s) {
    CISTRON_CHECK(expert[s] >= -1 && expert[s] < num_experts,
                  "row map: token {} slot {} names expert {}, outside [-1, {})", s / map.top_k,
                  s % map.top_k, expert[s], num_experts);
    if (expert[s] >= 0) ++counts[expert[s]];
  }
  std::vector<std::int32_t> next(static_cast<std::size_t>(num_experts));
  std::int32_t routed = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    next[static_cast<std::size_t>(e)] = routed;
    routed += static_cast<std::int32_t>(counts[e]);
  }
  std::int32_t* row_of_slot = map.row_of_slot.data<std::int32_t>();
  std::int32_t* slot_of_row = map.slot_of_row.data<std::int32_t>();
  for (std::int64_t s = 0; s < slots; ++s) {
    row_of_slot[s] = expert[s] < 0 ? -1 : next[static_cast<std::size_t>(expert[s])]++;
    if (expert[s] >= 0) slot_of_row[row_of_slot[s]] = static_cast<std::int32_t>(s);
  }
  for (std::int64_t r = routed; r < slots; ++r) slot_of_row[r] = -1;
  return map;
}

void Permute(const Context& ctx, const RowMap& map, const Tensor& x, const Output& rows) {
  const PermuteProblem problem = CheckPair("permute", map, "x", x, "rows", rows.tensor);
  Choose(ctx, problem).permute(ctx, map, x, rows);
}

void Unpermute(const Context& ctx, const RowMap& map, const Tensor& rows, const Tensor& probs,
               const Output& y) {
  const PermuteProblem problem = CheckPair("unpermute", map, "y", y.tensor, "rows", rows);
  if (probs) CheckSlots("unpermute", "probs", map, probs, ComputeType(problem.dtype));
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
  Choose(ctx, problem).unpermute_backward(ctx, map, dy, rows, probs, drows, dprobs);
}

void PermuteSlots(const Context&, const RowMap& map, const Tensor& slots, const Output& rows) {
  CheckColumn("permute slots", map, slots, rows.tensor);
  const std::int32_t* slot_of_row = map.slot_of_row.data<std::int32_t>();
  const std::int64_t routed = internal::RoutedRows(map);
  DispatchFloat("permute slots", slots.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = slots.data<T>();
    T* to = rows.tensor.data<T>();
    for (std::int64_t r = 0; r < routed; ++r) Store(to[r], from[slot_of_row[r]], rows.mode);
  });
}

void UnpermuteSlots(const Context&, const RowMap& map, const Tensor& rows, const Output& slots) {
  CheckColumn("unpermute slots", map, slots.tensor, rows);
  const std::int32_t* row_of_slot = map.row_of_slot.data<std::int32_t>();
  DispatchFloat("unpermute slots", rows.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = rows.data<T>();
    T* to = slots.tensor.data<T>();
    for (std::int64_t s = 0; s < slots.tensor.numel(); ++s) {
      Store(to[s], row_of_slot[s] < 0 ? T(0.0f) : from[row_of_slot[s]], slots.mode);
    }
  });
}

std::span<const PermuteImpl> PermuteImpls() {
  return kImpls;
}

}  // namespace cistron::ops
