// Sizes of plans of cuDNN, and the plan of a problem.
#include "cistron/ops/attention/attention_cudnn_shape.h"

#include <algorithm>
#include <bit>

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kRowsOfTile = 128;  // the largest tile of cuDNN's kernels

std::int64_t RoundUp(std::int64_t x, std::int64_t to) {
  return (x + to - 1) / to * to;
}

// A power of two or one and a half of it, but for multiples of `least` where those are closer: less
// than half, or less than `least`, is waste.
std::int64_t RoundSize(std::int64_t x, std::int64_t least) {
  const auto below = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(x)));
  return RoundUp(x, std::max(least, below / 2));
}

}  // namespace

CudnnShape CudnnShapeOf(const AttentionProblem& problem) {
  const std::int64_t bound = std::max<std::int64_t>(
      1, problem.max_length > 0 ? std::min(problem.max_length, problem.tokens) : problem.tokens);
  if (problem.uniform && bound % kRowsOfTile == 0) {
    return {false, std::max<std::int64_t>(1, problem.num_sequences), bound};
  }
  const auto batch = static_cast<std::uint64_t>(std::max<std::int64_t>(1, problem.num_sequences));
  return {true, static_cast<std::int64_t>(std::bit_ceil(batch)), RoundSize(bound, kRowsOfTile)};
}

std::int64_t CudnnScoreBytes(const CudnnShape& shape, std::int64_t heads) {
  const std::int64_t length = RoundUp(shape.length, kRowsOfTile);
  return shape.batch * heads * length * length * 2;
}

std::int64_t CudnnHeadsAtOnce(const AttentionConfig& config, const CudnnShape& shape) {
  const std::int64_t group = config.num_heads / config.num_kv_heads;
  std::int64_t heads = config.num_kv_heads;
  while (heads > 1 && (config.num_kv_heads % heads != 0 ||
                       CudnnScoreBytes(shape, heads * group) > kCudnnScoreBytes)) {
    --heads;
  }
  return heads;
}

bool CudnnOfKeys(CudnnOperand operand) {
  return operand == CudnnOperand::kK || operand == CudnnOperand::kV ||
         operand == CudnnOperand::kDK || operand == CudnnOperand::kDV;
}

CudnnPlanKey CudnnKeyOf(const AttentionProblem& problem, bool backward, bool deterministic) {
  const AttentionConfig& config = problem.config;
  const CudnnShape shape = CudnnShapeOf(problem);
  CudnnPlanKey key;
  key.backward = backward;
  key.deterministic = deterministic || !backward;  // forward always is
  key.ragged = shape.ragged;
  key.batch = shape.batch;
  key.length = shape.length;
  // Bounds buffers of ragged backward only.
  constexpr std::int64_t kTokensStep = 1024;
  if (backward && shape.ragged) key.tokens = RoundSize(problem.tokens, kTokensStep);
  key.kv_heads = backward && deterministic ? CudnnHeadsAtOnce(config, shape) : config.num_kv_heads;
  key.heads = key.kv_heads * (config.num_heads / config.num_kv_heads);
  key.head_dim = config.head_dim;
  // A window that no sequence fills masks nothing.
  key.window = config.window < shape.length ? config.window : 0;
  for (int i = 0; i < kCudnnOperands; ++i) {
    const auto operand = static_cast<CudnnOperand>(i);
    if (!backward && operand > CudnnOperand::kO) break;
    key.row_strides[static_cast<std::size_t>(i)] =
        (CudnnOfKeys(operand) ? config.num_kv_heads : config.num_heads) * config.head_dim;
  }
  return key;
}

}  // namespace cistron::ops::internal
