// The implementations behind attention.h; only attention.cc includes this.
#pragma once

#include "cistron/ops/attention/attention.h"

namespace cistron::ops {

extern const AttentionImpl kAttentionCudnn;
extern const AttentionImpl kAttentionFlash;
extern const AttentionImpl kAttentionCuda;
// Backward adds to dq in any order, so that its bits differ from run to run. It runs where it is
// asked for by name.
extern const AttentionImpl kAttentionCudnnAtomics;

AttentionImpl CpuAttention();
AttentionImpl RefAttention();

}  // namespace cistron::ops
