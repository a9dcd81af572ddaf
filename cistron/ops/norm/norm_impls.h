// The implementations behind norm.h; only norm.cc includes this.
#pragma once

#include "cistron/ops/norm/norm.h"

namespace cistron::ops {

RmsNormImpl CudaRmsNorm();
RmsNormImpl CpuRmsNorm();
RmsNormImpl RefRmsNorm();

}  // namespace cistron::ops
