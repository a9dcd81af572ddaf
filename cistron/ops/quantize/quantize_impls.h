// Implementations of quantize, for its list in quantize.cc.
#pragma once

#include "cistron/ops/quantize/block_grid.h"
#include "cistron/ops/quantize/quantize.h"

namespace cistron::ops::internal {

// Vector kernels over bands of rows, bit for bit as the reference.
QuantizeImpl CpuQuantize();

// Scalar reference: one value after another, by the formulas of quantize.h.
QuantizeImpl RefQuantize();

}  // namespace cistron::ops::internal
