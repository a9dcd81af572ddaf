// Where the blocks of a quantised copy lie: the geometry that quantisation, its inverse and the
// products share.
#pragma once

#include <cstdint>
#include <vector>

#include "cistron/tensor/quantized_tensor.h"

namespace cistron::ops {

// Rows [begin, end) of the tensor seen as one matrix, whose blocks begin at `begin`; its scales
// begin at row `scale_row` of the scales seen as one matrix.
struct BlockSegment {
  std::int64_t group, begin, end, scale_row;
};

struct BlockGrid {
  std::int64_t rows = 0, cols = 0;  // of the whole, [G, M, K] seen as [G·M, K]
  std::int64_t groups = 1;
  std::int64_t block_rows = 1, block_cols = 1;  // 0 for kTensor: a group is one block
  std::int64_t part_cols = 0;                   // columns after which blocks restart
  std::int64_t scale_cols = 0;                  // scales in a row of scales
  std::vector<BlockSegment> segments;           // in order; they cover the rows in use

  // Index of a scale within its row of scales, and the row of scales of a row.
  std::int64_t ScaleCol(std::int64_t col) const {
    if (block_cols == 0) return 0;
    const std::int64_t part = col / part_cols;
    const std::int64_t blocks = (part_cols + block_cols - 1) / block_cols;
    return part * blocks + (col - part * part_cols) / block_cols;
  }
  std::int64_t ScaleRow(const BlockSegment& s, std::int64_t row) const {
    return block_rows == 0 ? s.group : s.scale_row + (row - s.begin) / block_rows;
  }
};

// A copy to be filled and where its blocks lie; the codes are seen as one matrix.
struct QuantizeTarget {
  Direction direction;
  BlockGrid grid;
  QuantizedCopy copy;
};

// Reads split_sizes; throws, naming `op`, when they are negative or sum to more than the rows.
BlockGrid MakeBlockGrid(std::string_view op, const QuantizedTensor& q, Direction direction);

}  // namespace cistron::ops
