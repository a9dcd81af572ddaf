// The implementations of cross_entropy; private to this folder.
#pragma once

#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::ops {

extern const CrossEntropyImpl kCrossEntropyRef;

}  // namespace cistron::ops
