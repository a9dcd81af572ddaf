// The implementations of cross_entropy; private to this folder.
#pragma once

#include <algorithm>

#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::ops {

extern const CrossEntropyImpl kCrossEntropyCuda;
extern const CrossEntropyImpl kCrossEntropyCpu;
extern const CrossEntropyImpl kCrossEntropyRef;

// Tokens whose logits are in memory at once: 4 MiB of fp32 logits, at least 256 tokens (so that the
// product that makes dw reads and writes dw seldom) and at most 1024.
inline std::int64_t CrossEntropyChunk(std::int64_t vocab) {
  const std::int64_t fitting = (std::int64_t{4} << 20) / (4 * vocab);
  return std::clamp<std::int64_t>(fitting, 256, 1024);
}

// The same on a GPU, which needs more rows at once to be busy: 16 MiB of fp32 logits.
inline std::int64_t CrossEntropyCudaChunk(std::int64_t vocab) {
  const std::int64_t fitting = (std::int64_t{16} << 20) / (4 * vocab);
  return std::clamp<std::int64_t>(fitting, 1024, 4096);
}

// A chunk of logits [tokens, V] that the CPU kernel turns into nll and gradients.
struct ChunkOfLogits {
  std::int64_t vocab = 0;
  float* logits = nullptr;
  const std::int64_t* labels = nullptr;
  const float* weights = nullptr;  // null: all 1
  float grad_scale = 0;
  float* nll = nullptr;
  float* gradients = nullptr;     // in fp32, or
  bf16* low_gradients = nullptr;  // in bf16, or none
};

}  // namespace cistron::ops
