// Row offsets of a grouped tensor on the host.
#pragma once

#include <string_view>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::ops {

// Offsets [E + 1] of each group's first row; the last entry is the number of rows in use. Throws,
// naming `op`, when a count is negative or the counts sum to more than `max_rows`.
std::vector<std::int64_t> RowOffsets(std::string_view op, const Tensor& split_sizes,
                                     std::int64_t max_rows);

// Σ split_sizes, checked as above; all `rows` where it is undefined.
std::int64_t RowsInUse(std::string_view op, const Tensor& split_sizes, std::int64_t rows);

}  // namespace cistron::ops
