// The implementations of balance_loss; private to this folder.
#pragma once

#include "cistron/ops/balance_loss/balance_loss.h"

namespace cistron::ops {

extern const BalanceLossImpl kBalanceLossCuda;
extern const BalanceLossImpl kBalanceLossCpu;

}  // namespace cistron::ops
