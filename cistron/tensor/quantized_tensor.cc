#include "cistron/tensor/quantized_tensor.h"

#include "cistron/base/error.h"

namespace cistron {

std::string_view Name(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor: return "tensor";
    case Scaling::kBlock1x128: return "block 1x128";
    case Scaling::kBlock128x128: return "block 128x128";
    case Scaling::kMxfp8: return "mxfp8";
    case Scaling::kMxfp8Block32x32: return "mxfp8 32x32";
  }
  return "?";
}

std::int64_t BlockSize(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor: return 0;
    case Scaling::kBlock1x128:
    case Scaling::kBlock128x128: return 128;
    case Scaling::kMxfp8:
    case Scaling::kMxfp8Block32x32: return 32;
  }
  return 0;
}

bool IsDirectionless(Scaling scaling) {
  return scaling != Scaling::kMxfp8 && scaling != Scaling::kBlock1x128;
}

std::int64_t QuantizedTensor::num_groups() const {
  if (split_sizes) return split_sizes.dim(0);
  return shape.rank() == 3 ? shape[0] : 1;
}

std::int64_t QuantizedTensor::bytes() const {
  std::int64_t sum = 0;
  for (const QuantizedCopy* c : {&rowwise, &columnwise}) {
    if (!*c || (c == &columnwise && rowwise && c->codes.raw() == rowwise.codes.raw())) continue;
    sum += c->codes.bytes() + c->scales.bytes();
  }
  return sum;
}

QuantizedTensor SliceGroups(const QuantizedTensor& q, std::span<const std::int64_t> offsets,
                            std::int64_t begin, std::int64_t end) {
  CISTRON_CHECK(0 <= begin && begin <= end && end <= q.num_groups(),
                "quantize: groups {} to {} of {} with {} groups", begin, end, Describe(q),
                q.num_groups());
  const std::int64_t groups = end - begin;
  QuantizedTensor part{q.layout, q.shape, {}, {}, {}};
  if (!q.split_sizes) {
    part.shape[0] = groups;
    for (const auto& [from, to] :
         {std::pair{&q.rowwise, &part.rowwise}, std::pair{&q.columnwise, &part.columnwise}}) {
      if (*from) *to = {from->codes.Slice(0, begin, groups), from->scales.Slice(0, begin, groups)};
    }
    return part;
  }
  const auto at = [&](std::int64_t e) { return offsets[static_cast<std::size_t>(e)]; };
  const std::int64_t first = at(begin);
  part.shape[0] = at(end) - first;
  part.split_sizes = q.split_sizes.Slice(0, begin, groups);
  const std::int64_t block = BlockSize(q.layout.scaling);
  for (const Direction direction : {Direction::kRowwise, Direction::kColumnwise}) {
    const QuantizedCopy& from = q.copy(direction);
    if (!from) continue;
    const std::int64_t length = ScaleShape(q.layout, part.shape, part.split_sizes, direction)[0];
    std::int64_t scale_row = first;
    if (q.layout.scaling == Scaling::kTensor) {
      scale_row = begin;
    } else if (IsDirectionless(q.layout.scaling) || direction == Direction::kColumnwise) {
      scale_row = 0;
      for (std::int64_t e = 0; e < begin; ++e) scale_row += (at(e + 1) - at(e) + block - 1) / block;
    }
    QuantizedCopy& to = direction == Direction::kRowwise ? part.rowwise : part.columnwise;
    to.codes = from.codes.Slice(0, first, part.shape[0]);
    to.scales = from.scales.Slice(0, scale_row, length);
  }
  return part;
}

std::string Describe(const QuantizedTensor& q) {
  return fmt::format("{} {} {}", Name(q.layout.scaling), Name(q.layout.format), ToString(q.shape));
}

Shape ScaleShape(const QuantizedLayout& layout, const Shape& shape, const Tensor& split_sizes,
                 Direction direction) {
  CISTRON_CHECK(shape.rank() == 2 || (shape.rank() == 3 && !split_sizes),
                "quantize: shape {} is neither [M, K] nor, without split_sizes, [G, M, K]",
                ToString(shape));
  const bool stacked = shape.rank() == 3;
  const std::int64_t groups = split_sizes ? split_sizes.dim(0) : stacked ? shape[0] : 1;
  if (layout.scaling == Scaling::kTensor) return {groups};
  const std::int64_t rows = shape[shape.rank() - 2], cols = shape[shape.rank() - 1];
  const std::int64_t block = BlockSize(layout.scaling);
  const auto blocks = [block](std::int64_t n, std::int64_t parts) {
    return parts * ((n / parts + block - 1) / block);
  };
  const bool square = IsDirectionless(layout.scaling);
  std::int64_t scale_rows = rows, scale_cols = cols;
  if (square || direction == Direction::kColumnwise) {
    scale_rows =
        split_sizes ? (rows + groups * (block - 1)) / block : blocks(rows, layout.row_parts);
  }
  if (square || direction == Direction::kRowwise) scale_cols = blocks(cols, layout.col_parts);
  if (stacked) return {groups, scale_rows, scale_cols};
  return {scale_rows, scale_cols};
}

}  // namespace cistron
