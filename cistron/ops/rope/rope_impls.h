// The implementations behind rope.h; only rope.cc includes this.
#pragma once

#include "cistron/ops/rope/rope.h"

namespace cistron::ops {

RopeImpl CudaRope();
RopeImpl CpuRope();
RopeImpl RefRope();

}  // namespace cistron::ops
