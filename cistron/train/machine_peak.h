// How fast this machine multiplies matrices, which MFU is a part of, and copies memory.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::train {

// Floating-point operations a second of the fastest of a few square products in `dtype`, measured
// in some hundredths of a second with the present number of threads.
double MeasurePeakFlops(const ops::Context& ctx, DType dtype);

// Bytes a second, read and written, of the fastest of a few copies that no cache holds.
double MeasurePeakBandwidth(const ops::Context& ctx);

}  // namespace cistron::train
