#include "cistron/nn/rotary_table.h"

#include <algorithm>
#include <bit>

#include "cistron/ops/rope/rope.h"

namespace cistron::nn {

Tensor RotaryTable::ForPositions(const ops::Context& ctx, std::int64_t positions) {
  positions = std::max<std::int64_t>(positions, 1);  // padding has position 0
  if (!table_ || table_.dim(0) < positions) {
    const auto rows = std::bit_ceil(static_cast<std::uint64_t>(positions));
    if (table_) outgrown_.push_back(table_);
    table_ = ctx.Place(
        ops::RopeTable(static_cast<std::int64_t>(rows), head_dim_, theta_, compute_type_));
  }
  return table_;
}

}  // namespace cistron::nn
