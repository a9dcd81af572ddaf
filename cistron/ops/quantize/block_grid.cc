#include "cistron/ops/quantize/block_grid.h"

#include "cistron/ops/split_sizes.h"

namespace cistron::ops {

BlockGrid MakeBlockGrid(std::string_view op, const QuantizedTensor& q, Direction direction) {
  const QuantizedLayout& layout = q.layout;
  const int rank = q.shape.rank();
  const std::int64_t matrix_rows = q.shape[rank - 2];
  BlockGrid grid;
  grid.groups = q.num_groups();
  grid.cols = q.shape[rank - 1];
  grid.rows = rank == 3 ? q.shape[0] * matrix_rows : matrix_rows;
  grid.part_cols = grid.cols / layout.col_parts;
  const std::int64_t block = BlockSize(layout.scaling);
  const bool square = IsDirectionless(layout.scaling);
  grid.block_rows = square || direction == Direction::kColumnwise ? block : 1;
  grid.block_cols = square || direction == Direction::kRowwise ? block : 1;
  if (layout.scaling == Scaling::kTensor) {
    grid.scale_cols = 1;
  } else {
    const std::int64_t blocks = (grid.part_cols + grid.block_cols - 1) / grid.block_cols;
    grid.scale_cols = layout.col_parts * blocks;
  }
  std::int64_t scale_row = 0;
  const auto add = [&](std::int64_t group, std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    grid.segments.push_back({group, begin, end, scale_row});
    scale_row += grid.block_rows == 0 ? 0 : (end - begin + grid.block_rows - 1) / grid.block_rows;
  };
  if (q.split_sizes) {
    const auto offsets = RowOffsets(op, q.split_sizes, matrix_rows);
    for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
      add(static_cast<std::int64_t>(e), offsets[e], offsets[e + 1]);
    }
  } else {
    const std::int64_t part_rows = matrix_rows / layout.row_parts;
    for (std::int64_t i = 0; i < grid.groups * layout.row_parts; ++i) {
      add(i / layout.row_parts, i * part_rows, (i + 1) * part_rows);
    }
  }
  return grid;
}

}  // namespace cistron::ops
