// How fast this machine multiplies matrices: what MFU is a part of.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::train {

// Floating-point operations a second of the fastest of a few square products in `dtype`, measured
// in some hundredths of a second with the present number of threads.
double MeasurePeakFlops(const ops::Context& ctx, DType dtype);

}  // namespace cistron::train
