// Verification of a numerics file: router, permutation, and their gradients.
#include <cmath>
#include <regex>

#include "cistron/check/bounds.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/ops/router/router.h"
#include "cistron/train/numerics_file.h"

namespace cistron::train {
namespace {

using ops::RouterConfig;
using ops::ScoreFunction;

// Relative error of a probability in fp32: its exponentials, their sum of at most E terms and the
// division; the exponent's argument, up to 32, errs by one rounding.
double ProbabilityBound(std::int64_t experts) {
  return check::Gamma(2 * experts + 8, DType::kF32) + 32 * check::UnitRoundoff(DType::kF32);
}

ops::RouterOutputs Route(const ops::Context& ctx, const RouterConfig& config, const Tensor& logits,
                         const Tensor& bias = {}) {
  ops::RouterOutputs out;
  const std::int64_t tokens = logits.dim(0), experts = config.num_experts;
  out.experts = ctx.Empty({tokens, config.top_k}, DType::kI32);
  out.probs = ctx.Empty({tokens, config.top_k}, DType::kF32);
  out.counts = ctx.Empty({1, experts}, DType::kI64);
  out.score_sums = ctx.Empty({1, experts}, DType::kF64);
  out.z_sums = ctx.Empty({1}, DType::kF64);
  out.nonfinite_tokens = ctx.Empty({}, DType::kI64);
  ops::RouterForward(ctx, config, logits, bias, {}, {}, out);
  return out;
}

void Permutation(const ops::Context& ctx, NumericsFile& file, NumericsTable& table,
                 const std::string& prefix, const Tensor& experts, std::int64_t num_experts) {
  const ops::RowMap map = ops::BuildRowMap(ctx, experts, num_experts);
  const Tensor tokens = ctx.Empty(map.slot_of_row.shape(), DType::kI32);
  const Tensor slots = ctx.Empty(map.slot_of_row.shape(), DType::kI32);
  const auto top_k = static_cast<std::int32_t>(map.top_k);
  for (std::int64_t r = 0; r < tokens.numel(); ++r) {
    const std::int32_t slot = map.slot_of_row.data<std::int32_t>()[r];
    tokens.data<std::int32_t>()[r] = slot / top_k;
    slots.data<std::int32_t>()[r] = slot % top_k;
  }
  table.Bitwise("permutation", tokens, file.Get(prefix + "permute.source_token"));
  table.Bitwise("permutation", slots, file.Get(prefix + "permute.source_slot"));
}

// router.TxEkK.*
void Forward(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"((router\.\d+x\d+k(\d+)\.)in\.logits)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const std::string prefix = match[1];
    const Tensor logits = file.Get(name);
    const double tokens = static_cast<double>(logits.dim(0));
    RouterConfig config{.num_experts = logits.dim(1), .top_k = std::stoll(match[2])};
    const double bound = ProbabilityBound(config.num_experts);
    for (const auto& [score, key] : {std::pair{ScoreFunction::kSoftmaxBeforeTopK, "softmax_pre"},
                                     {ScoreFunction::kSoftmaxAfterTopK, "softmax_post"}}) {
      config.score = score;
      const ops::RouterOutputs out = Route(ctx, config, logits);
      table.Bitwise("router choice", out.experts, file.Get(prefix + "softmax.topk_experts"));
      table.ToMaximum("router probabilities", out.probs, file.Get(prefix + key + ".probs"), bound);
      table.Bitwise("router counts", out.counts, file.Get(prefix + "tokens_per_expert"));
      double aux = 0;
      for (std::int64_t e = 0; e < config.num_experts; ++e) {
        aux += ElementAsDouble(out.counts, e) * ElementAsDouble(out.score_sums, e) / tokens;
      }
      aux *= static_cast<double>(config.num_experts) / (static_cast<double>(config.top_k) * tokens);
      table.Number("auxiliary loss", aux, file.Get(prefix + "aux_loss_unit").item(), bound);
      table.Number("z loss", ElementAsDouble(out.z_sums, 0) / tokens,
                   file.Get(prefix + "z_loss_unit").item(), 2 * bound);
      if (score == ScoreFunction::kSoftmaxAfterTopK) {
        Permutation(ctx, file, table, prefix, out.experts, config.num_experts);
      }
    }
    config.score = ScoreFunction::kSigmoid;
    const ops::RouterOutputs out = Route(ctx, config, logits, file.Get(prefix + "in.expert_bias"));
    table.Bitwise("router choice", out.experts, file.Get(prefix + "sigmoid_bias.topk_experts"));
    table.ToMaximum("router probabilities", out.probs, file.Get(prefix + "sigmoid_bias.probs"),
                    bound);
  }
}

// router_edge.TxE.kK.topk_experts: ties, infinities, NaN.
void Edges(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"((router_edge\.\d+x\d+\.)k(\d+)\.topk_experts)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const Tensor logits = file.Get(match[1].str() + "in.logits");
    for (const ScoreFunction score :
         {ScoreFunction::kSoftmaxBeforeTopK, ScoreFunction::kSoftmaxAfterTopK}) {
      const RouterConfig config{
          .score = score, .num_experts = logits.dim(1), .top_k = std::stoll(match[2])};
      table.Bitwise("router edges", Route(ctx, config, logits).experts, file.Get(name));
    }
  }
}

// router_group.TxE.[groupsGkeptP.]kK.probs
void Groups(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(
      R"((router_group\.\d+x\d+\.)((?:groups(\d+)kept(\d+)\.)?k(\d+)\.)probs)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const std::string prefix = match[1], key = match[2];
    const Tensor logits = file.Get(prefix + "in.logits");
    RouterConfig config{.score = ScoreFunction::kSigmoid,
                        .num_experts = logits.dim(1),
                        .top_k = std::stoll(match[5])};
    if (match[3].matched) {
      config.num_groups = std::stoll(match[3]);
      config.groups_kept = std::stoll(match[4]);
    }
    const ops::RouterOutputs out = Route(ctx, config, logits, file.Get(prefix + "in.expert_bias"));
    table.Bitwise("router groups", out.experts, file.Get(prefix + key + "topk_experts"));
    table.ToMaximum("router group probabilities", out.probs, file.Get(name),
                    ProbabilityBound(config.num_experts));
  }
}

// router_grad.TxE.kK.KIND.dlogits
void Gradients(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  static const std::regex kName(R"((router_grad\.\d+x\d+\.)k(\d+)\.(\w+)\.dlogits)");
  static const std::regex kZ(R"((router_grad\.\d+x\d+\.)z_loss_unit\.dlogits)");
  for (const std::string& name : file.Names()) {
    std::smatch match;
    const bool z = std::regex_match(name, match, kZ);
    if (!z && !std::regex_match(name, match, kName)) continue;
    const Tensor logits = file.Get(match[1].str() + "in.logits");
    const std::int64_t tokens = logits.dim(0), experts = logits.dim(1);
    RouterConfig config{.num_experts = experts, .top_k = z ? 1 : std::stoll(match[2])};
    const std::string kind = z ? "z_loss_unit" : match[3].str();
    if (kind == "softmax_pre") config.score = ScoreFunction::kSoftmaxBeforeTopK;
    if (kind == "sigmoid") config.score = ScoreFunction::kSigmoid;
    const ops::RouterOutputs out = Route(ctx, config, logits);
    Tensor dprobs, aux_grad, z_grad;
    if (z) {
      z_grad = ctx.Empty({1}, DType::kF64);
      *z_grad.data<double>() = 1.0 / static_cast<double>(tokens);
    } else if (kind == "aux_loss_unit") {
      // aux = E/(K·T) Σ count · score_sum / T
      aux_grad = ctx.Empty({1, experts}, DType::kF64);
      const double t = static_cast<double>(tokens);
      for (std::int64_t e = 0; e < experts; ++e) {
        aux_grad.data<double>()[e] = static_cast<double>(experts) /
                                     (static_cast<double>(config.top_k) * t) *
                                     ElementAsDouble(out.counts, e) / t;
      }
    } else {
      const Tensor given = file.Get(match[1].str() + "in.dprobs");
      dprobs = ctx.Empty(given.shape(), DType::kF32);
      Convert(given, dprobs);
    }
    const Tensor dlogits = ctx.Empty(logits.shape(), DType::kF32);
    ops::RouterBackward(ctx, config, dprobs, logits, out.experts, {}, {}, aux_grad, z_grad,
                        ops::Write(dlogits));
    // The largest gradient is of the size of the terms that cancel in it, up to Σ|dprobs|·p; for
    // the auxiliary loss, count less mean cancels up to the spread of the counts.
    const double factor = z ? 4 : kind == "aux_loss_unit" ? 16 : 4;
    table.ToMaximum("router gradients", dlogits, file.Get(name),
                    factor * ProbabilityBound(experts));
  }
}

void Unpermutation(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  if (!file.Has("unpermute.y")) return;
  const auto as = [&](const char* name, DType dtype) {
    const Tensor given = file.Get(std::string("unpermute.in.") + name);
    Tensor t = ctx.Empty(given.shape(), dtype);
    Convert(given, t);
    return t;
  };
  const Tensor experts = as("topk_experts", DType::kI32), expected = file.Get("unpermute.y");
  std::int32_t most = 0;
  for (const std::int32_t e : experts.span<std::int32_t>()) most = std::max(most, e);
  const ops::RowMap map = ops::BuildRowMap(ctx, experts, most + 1);
  const Tensor rows = as("rows", DType::kF32), probs = as("probs", DType::kF32);
  const Tensor y = ctx.Empty(expected.shape(), DType::kF32);
  ops::Unpermute(ctx, map, rows, probs, ops::Write(y));
  // Inputs of the file are fp64: each is rounded to f32 first, two more roundings a term.
  const std::int64_t width = y.dim(1);
  table.Bound("unpermutation", y, expected, [&](std::int64_t i) {
    double sum = 0;
    for (std::int64_t k = 0; k < map.top_k; ++k) {
      const std::int64_t slot = i / width * map.top_k + k;
      const std::int64_t row = map.row_of_slot.data<std::int32_t>()[slot];
      sum +=
          std::abs(ElementAsDouble(probs, slot) * ElementAsDouble(rows, row * width + i % width));
    }
    return check::DotBound(map.top_k + 2, sum, DType::kF32, DType::kF32);
  });
}

}  // namespace

void VerifyRouting(const ops::Context& ctx, NumericsFile& file, NumericsTable& table) {
  Forward(ctx, file, table);
  Edges(ctx, file, table);
  Groups(ctx, file, table);
  Gradients(ctx, file, table);
  Unpermutation(ctx, file, table);
}

}  // namespace cistron::train
