// The implementation of grouped_bias on a GPU; private to this folder.
#pragma once

#include "cistron/ops/grouped_bias/grouped_bias.h"

namespace cistron::ops {

extern const GroupedBiasImpl kGroupedBiasCuda;

}  // namespace cistron::ops
