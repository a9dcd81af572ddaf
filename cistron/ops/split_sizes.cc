#include "cistron/ops/split_sizes.h"

#include "cistron/ops/check_tensor.h"

namespace cistron::ops {

void CheckSplitSizes(std::string_view op, const Tensor& split_sizes, std::int64_t max_rows) {
  if (split_sizes && !OnHost(split_sizes)) {
    CheckTensor(op, "split_sizes", split_sizes, {split_sizes.dim(0)}, DType::kI64);
  } else {
    RowOffsets(op, split_sizes, max_rows);
  }
}

std::vector<std::int64_t> RowOffsets(std::string_view op, const Tensor& split_sizes,
                                     std::int64_t max_rows) {
  CISTRON_CHECK(split_sizes && split_sizes.rank() == 1 && split_sizes.dtype() == DType::kI64,
                "{}: split_sizes is {}, expected i64 [groups]", op, Describe(split_sizes));
  std::vector<std::int64_t> offsets{0};
  offsets.reserve(static_cast<std::size_t>(split_sizes.dim(0)) + 1);
  for (const std::int64_t count : split_sizes.span<std::int64_t>()) {
    const std::size_t group = offsets.size() - 1;
    CISTRON_CHECK(count >= 0, "{}: split_sizes[{}] = {} is negative; counts of rows are 0 or more",
                  op, group, count);
    CISTRON_CHECK(count <= max_rows - offsets.back(),
                  "{}: split_sizes[0..{}] sum to more than the {} rows of the buffer: "
                  "split_sizes[{}] = {} after {} rows of the groups before it; give counts that "
                  "sum to the rows, or to fewer",
                  op, group, max_rows, group, count, offsets.back());
    offsets.push_back(offsets.back() + count);
  }
  return offsets;
}

std::int64_t RowsInUse(std::string_view op, const Tensor& split_sizes, std::int64_t rows) {
  return split_sizes ? RowOffsets(op, split_sizes, rows).back() : rows;
}

}  // namespace cistron::ops
