// Counts of a grouped tensor: what the host can check, and row offsets where it can read them.
#pragma once

#include <string_view>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::ops {

// Throws, naming `op`, unless `split_sizes` is contiguous i64 [E]; when it lies on the host, also
// as RowOffsets does. Counts on a device are not read: its kernels clamp them to the rows there
// are.
void CheckSplitSizes(std::string_view op, const Tensor& split_sizes, std::int64_t max_rows);

// Offsets [E + 1] of each group's first row; the last entry is the number of rows in use. Throws,
// naming `op`, when a count is negative or the counts sum to more than `max_rows`.
std::vector<std::int64_t> RowOffsets(std::string_view op, const Tensor& split_sizes,
                                     std::int64_t max_rows);

// Σ split_sizes, checked as above; all `rows` where it is undefined.
std::int64_t RowsInUse(std::string_view op, const Tensor& split_sizes, std::int64_t rows);

}  // namespace cistron::ops
