// Argument checks and choice of implementation of embedding.
#include "cistron/ops/embedding/embedding.h"

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/embedding/embedding_impls.h"
#include "cistron/ops/op_work.h"

namespace cistron::ops {
namespace {

void CheckTokens(const Tensor& tokens, std::int64_t vocab) {
  CISTRON_CHECK(tokens && tokens.rank() == 1, "embedding: tokens are {}, expected i64 [T]",
                Describe(tokens));
  CheckTensor("embedding", "tokens", tokens, tokens.shape(), DType::kI64);
  if (!OnHost(tokens)) return;
  const std::int64_t* token = tokens.data<std::int64_t>();
  for (std::int64_t t = 0; t < tokens.numel(); ++t) {
    CISTRON_CHECK(token[t] >= 0 && token[t] < vocab,
                  "embedding: token {} at position {} is outside the vocabulary [0, {})", token[t],
                  t, vocab);
  }
}

}  // namespace

std::span<const EmbeddingImpl> EmbeddingImpls() {
  static const EmbeddingImpl list[] = {kEmbeddingCuda, kEmbeddingCpu, kEmbeddingRef};
  return list;
}

void EmbeddingForward(const Context& ctx, const Tensor& tokens, const Tensor& w, const Output& y) {
  CISTRON_CHECK(w && w.rank() == 2, "embedding: w is {}, expected [V, H]", Describe(w));
  CheckTensor("embedding", "w", w, w.shape(), w.dtype());
  CheckTokens(tokens, w.dim(0));
  CheckTensor("embedding", "y", y.tensor, {tokens.dim(0), w.dim(1)}, w.dtype());
  const EmbeddingProblem problem{w.dtype(), tokens.dim(0), w.dim(0), w.dim(1)};
  AnnounceWork(ctx, 0, y, y);
  Select(ctx, "embedding", EmbeddingImpls(), problem).forward(ctx, tokens, w, y);
}

void EmbeddingBackward(const Context& ctx, const Tensor& tokens, const Tensor& dy,
                       const Output& dw) {
  CISTRON_CHECK(dw && dw.tensor.rank() == 2, "embedding: dw is {}, expected [V, H]",
                Describe(dw.tensor));
  const Shape& table = dw.tensor.shape();
  CheckTokens(tokens, table[0]);
  CISTRON_CHECK(dy, "embedding: dy is not given");
  CheckTensor("embedding", "dy", dy, {tokens.dim(0), table[1]}, dy.dtype());
  CheckTensor("embedding", "dw", dw.tensor, table, ComputeType(dy.dtype()));
  const EmbeddingProblem problem{dy.dtype(), tokens.dim(0), table[0], table[1]};
  AnnounceWork(ctx, 0, dy, dw);
  Select(ctx, "embedding", EmbeddingImpls(), problem).backward(ctx, tokens, dy, dw);
}

}  // namespace cistron::ops
