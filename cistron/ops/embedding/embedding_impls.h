// The implementations of embedding; private to this folder.
#pragma once

#include "cistron/ops/embedding/embedding.h"

namespace cistron::ops {

extern const EmbeddingImpl kEmbeddingCuda;
extern const EmbeddingImpl kEmbeddingCpu;
extern const EmbeddingImpl kEmbeddingRef;

}  // namespace cistron::ops
