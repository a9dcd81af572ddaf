#include "cistron/ops/support_matrix.h"

#include "cistron/ops/activation/activation.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/ops/embedding/embedding.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/norm/norm.h"
#include "cistron/ops/optimizer/adamw.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/ops/rope/rope.h"
#include "cistron/ops/router/router.h"

namespace cistron::ops {
namespace {

// The sizes of a small model.
constexpr std::int64_t kTokens = 4096, kHidden = 192, kFfn = 384, kVocab = 256;
constexpr std::int64_t kExperts = 8, kTopK = 2, kHeads = 6, kHeadDim = 32;
constexpr std::int64_t kRows = kTokens * kTopK;
constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16};

// Appends the answers of an op's implementations; make(dtype) is the problem.
template <class Problem, class Run, class F>
void Ask(std::string_view op, std::span<const Implementation<Problem, Run>> list, F&& make,
         std::vector<SupportRow>& rows) {
  for (const auto& implementation : list) {
    for (const DType dtype : kDTypes) {
      rows.push_back({std::string(op), std::string(implementation.name), std::string(Name(dtype)),
                      implementation.supports(make(dtype))});
    }
  }
}

}  // namespace

std::vector<SupportRow> SupportMatrix() {
  std::vector<SupportRow> rows;
  Ask(
      "gemm", GemmImpls(),
      [](DType t) {
        return GemmProblem{t, t, Transpose::kNo, Transpose::kYes, kTokens, kHidden, kHidden};
      },
      rows);
  for (const auto& [kind, name] : {std::pair{GroupedGemmKind::kForward, "grouped_gemm forward"},
                                   {GroupedGemmKind::kDgrad, "grouped_gemm dgrad"},
                                   {GroupedGemmKind::kWgrad, "grouped_gemm wgrad"}}) {
    Ask(
        name, GroupedGemmImpls(),
        [&, &k = kind](DType t) {
          const DType out = k == GroupedGemmKind::kWgrad ? ComputeType(t) : t;
          return GroupedGemmProblem{k, t, out, kExperts, kRows, 2 * kFfn, kHidden};
        },
        rows);
  }
  Ask(
      "activation", SwiGluImpls(),
      [](DType t) {
        return SwiGluProblem{t, kRows, kFfn};
      },
      rows);
  Ask(
      "norm", RmsNormImpls(),
      [](DType t) {
        return RmsNormProblem{t, kTokens, kHidden};
      },
      rows);
  Ask(
      "rope", RopeImpls(),
      [](DType t) {
        return RopeProblem{t, kTokens, kHeads, kHeadDim};
      },
      rows);
  Ask(
      "attention", AttentionImpls(),
      [](DType t) {
        AttentionConfig config;
        config.num_heads = kHeads;
        config.num_kv_heads = kHeads;
        config.head_dim = kHeadDim;
        return AttentionProblem{t, config, kTokens};
      },
      rows);
  Ask(
      "embedding", EmbeddingImpls(),
      [](DType t) {
        return EmbeddingProblem{t, kTokens, kVocab, kHidden};
      },
      rows);
  Ask(
      "cross_entropy", CrossEntropyImpls(),
      [](DType t) {
        return CrossEntropyProblem{t, kTokens, kHidden, kVocab};
      },
      rows);
  Ask(
      "router", RouterImpls(),
      [](DType t) {
        return RouterProblem{t, {.num_experts = kExperts, .top_k = kTopK}, kTokens};
      },
      rows);
  Ask(
      "permute", PermuteImpls(),
      [](DType t) {
        return PermuteProblem{t, kTokens, kTopK, kHidden};
      },
      rows);
  Ask(
      "adamw", AdamWImpls(),
      [](DType t) {
        return AdamWProblem{t, kHidden * kHidden, false};
      },
      rows);
  Ask(
      "reduce", ReduceImpls(),
      [](DType t) {
        return ReduceProblem{t, kHidden * kHidden};
      },
      rows);
  return rows;
}

std::string FormatSupportMatrix() {
  std::string text = "| op | implementation |";
  std::string rule = "|---|---|";
  for (const DType dtype : kDTypes) {
    text += fmt::format(" {} |", Name(dtype));
    rule += "---|";
  }
  text += "\n" + rule;
  const std::string* op = nullptr;
  const std::string* impl = nullptr;
  const std::vector<SupportRow> rows = SupportMatrix();
  for (const SupportRow& row : rows) {
    if (op == nullptr || *op != row.op || *impl != row.impl) {
      text += fmt::format("\n| {} | {} |", row.op, row.impl);
    }
    text += row.support ? std::string(" yes |") : fmt::format(" no: {} |", row.support.reason);
    op = &row.op;
    impl = &row.impl;
  }
  return text + "\n";
}

}  // namespace cistron::ops
