// The sizes for which attention plans cuDNN's kernels; private to this folder.
#pragma once

#include <cstdint>

#include "cistron/ops/attention/attention.h"
#include "cistron/ops/attention/attention_cudnn_plan.h"

namespace cistron::ops::internal {

// A plan of cuDNN is made for fixed sizes and costs a compilation. Packed sequences differ from
// micro-batch to micro-batch, so their sizes are rounded up, and few plans serve all of a run:
// sequences to a power of two, those that are not there having length 0; lengths and tokens to a
// power of two or one and a half of it. Sizes alone decide, not which plans there are: another
// plan might be another kernel, and a run that resumes must have the bits of one that did not stop.
struct CudnnShape {
  bool ragged;          // sequences at offsets in device memory; else all have `length` tokens
  std::int64_t batch;   // sequences
  std::int64_t length;  // of the longest
};
CudnnShape CudnnShapeOf(const AttentionProblem& problem);

// Bytes of the gradients of scores, [batch, heads, length, length] in bf16, which deterministic
// backward keeps: it makes dq from them in a product of its own, in place of atomic additions.
std::int64_t CudnnScoreBytes(const CudnnShape& shape, std::int64_t heads);

// Key/value heads (with their query heads) that a deterministic backward takes in one launch, so
// that the gradients of scores take no more than kCudnnScoreBytes; at least 1, divides
// num_kv_heads.
std::int64_t CudnnHeadsAtOnce(const AttentionConfig& config, const CudnnShape& shape);

// The plan of a problem whose matrices have their rows one after another; of a backward that takes
// some heads at once, for those.
CudnnPlanKey CudnnKeyOf(const AttentionProblem& problem, bool backward, bool deterministic);

// Whether an operand has the heads of keys, not of queries.
bool CudnnOfKeys(CudnnOperand operand);

// All 32 heads of one sequence of 8192 tokens. On an H200 their backward takes 3.0 ms at once and
// 3.7 ms in four parts. Where one key/value head needs more, another implementation runs.
inline constexpr std::int64_t kCudnnScoreBytes = std::int64_t{4} << 30;

}  // namespace cistron::ops::internal
