// Implementations of quantize, for its list in quantize.cc.
#pragma once

#include "cistron/ops/quantize/block_grid.h"
#include "cistron/ops/quantize/quantize.h"

namespace cistron::ops::internal {

// Scalar reference: one value after another, by the formulas of quantize.h.
QuantizeImpl RefQuantize();

}  // namespace cistron::ops::internal
