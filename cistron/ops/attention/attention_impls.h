// The implementations behind attention.h; only attention.cc includes this.
#pragma once

#include "cistron/ops/attention/attention.h"

namespace cistron::ops {

extern const AttentionImpl kAttentionCuda;

AttentionImpl CpuAttention();
AttentionImpl RefAttention();

}  // namespace cistron::ops
