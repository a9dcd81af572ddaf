// Argument checks and choice of implementation of cross_entropy.
#include "cistron/ops/cross_entropy/cross_entropy.h"

#include "cistron/ops/check_tensor.h"
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"

namespace cistron::ops {
namespace {

constexpr std::string_view kOp = "cross_entropy";

void CheckLabels(const Tensor& labels, std::int64_t vocab) {
  const std::int64_t* label = labels.data<std::int64_t>();
  for (std::int64_t t = 0; t < labels.numel(); ++t) {
    CISTRON_CHECK(label[t] == kIgnoreLabel || (label[t] >= 0 && label[t] < vocab),
                  "cross_entropy: label {} at position {} is neither {} (ignored) nor in [0, {})",
                  label[t], t, kIgnoreLabel, vocab);
  }
}

}  // namespace

std::span<const CrossEntropyImpl> CrossEntropyImpls() {
  static const CrossEntropyImpl list[] = {kCrossEntropyCuda, kCrossEntropyCpu, kCrossEntropyRef};
  return list;
}

void LinearCrossEntropy(const Context& ctx, const CrossEntropyArgs& args) {
  CISTRON_CHECK(args.x && args.x.rank() == 2, "cross_entropy: x is {}, expected [T, H]",
                Describe(args.x));
  CISTRON_CHECK(args.w && args.w.rank() == 2, "cross_entropy: w is {}, expected [V, H]",
                Describe(args.w));
  const DType dtype = args.x.dtype();
  const std::int64_t tokens = args.x.dim(0), width = args.x.dim(1), vocab = args.w.dim(0);
  CheckTensor(kOp, "x", args.x, {tokens, width}, dtype);
  CheckTensor(kOp, "w", args.w, {vocab, width}, dtype);
  CISTRON_CHECK(vocab >= 1, "cross_entropy: the vocabulary is empty");
  CheckTensor(kOp, "labels", args.labels, {tokens}, DType::kI64);
  if (args.weights) CheckTensor(kOp, "weights", args.weights, {tokens}, DType::kF32);
  CheckTensor(kOp, "nll", args.nll, {tokens}, ComputeType(dtype));
  if (args.dx || args.dw) CheckTensor(kOp, "grad_scale", args.grad_scale, {}, DType::kF64);
  if (args.dx) CheckTensor(kOp, "dx", args.dx.tensor, {tokens, width}, dtype);
  if (args.dw) CheckTensor(kOp, "dw", args.dw.tensor, {vocab, width}, ComputeType(dtype));
  if (OnHost(args.labels)) CheckLabels(args.labels, vocab);
  Select(ctx, kOp, CrossEntropyImpls(), CrossEntropyProblem{dtype, tokens, width, vocab})
      .run(ctx, args);
}

}  // namespace cistron::ops
