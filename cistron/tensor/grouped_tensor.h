// Rows of several groups (experts), one group after another, in one buffer.
#pragma once

#include <cstdint>

#include "cistron/tensor/tensor.h"

namespace cistron {

// `data` is [rows, …]; group e owns split_sizes[e] consecutive rows, starting after those of the
// groups before it. The sum of the sizes may be less than `data.dim(0)`: rows beyond it are never
// read and never written. Counts stay on the device; the host knows only the bound `data.dim(0)`.
struct GroupedTensor {
  Tensor data;
  Tensor split_sizes;  // i64 [groups], on data's device

  std::int64_t num_groups() const { return split_sizes.dim(0); }
  std::int64_t max_rows() const { return data.dim(0); }
};

}  // namespace cistron
