// permute on the host: the map of rows, and columns of one value a slot. Both host implementations
// use these.
#include "cistron/ops/permute/permute_impls.h"

namespace cistron::ops::internal {
namespace {

template <class T>
void Store(T& out, T value, WriteMode mode) {
  using C = Compute<T>;
  out = mode == WriteMode::kAccumulate ? static_cast<T>(static_cast<C>(out) + static_cast<C>(value))
                                       : value;
}

}  // namespace

RowMap BuildRowMapHost(const Context& ctx, const Tensor& experts, std::int64_t num_experts) {
  const std::int64_t slots = experts.numel();
  RowMap map{ctx.Zeros({num_experts}, DType::kI64), ctx.Empty({slots}, DType::kI32),
             ctx.Empty({slots}, DType::kI32), experts.dim(1)};
  const std::int32_t* expert = experts.span<std::int32_t>().data();
  std::int64_t* counts = map.split_sizes.data<std::int64_t>();
  for (std::int64_t s = 0; s < slots; ++s) {
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

void PermuteSlotsHost(const Context&, const RowMap& map, const Tensor& slots, const Output& rows) {
  const std::int32_t* slot_of_row = map.slot_of_row.data<std::int32_t>();
  const std::int64_t routed = RoutedRows(map);
  DispatchFloat("permute slots", slots.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = slots.data<T>();
    T* to = rows.tensor.data<T>();
    for (std::int64_t r = 0; r < routed; ++r) Store(to[r], from[slot_of_row[r]], rows.mode);
  });
}

void UnpermuteSlotsHost(const Context&, const RowMap& map, const Tensor& rows,
                        const Output& slots) {
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

}  // namespace cistron::ops::internal
