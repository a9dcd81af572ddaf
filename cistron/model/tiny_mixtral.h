// For tests only: a Mixtral of a few thousand weights, batches for it, its loss and gradients.
#pragma once

#include <vector>

#include "cistron/base/philox.h"
#include "cistron/model/local_mixtral.h"

namespace cistron::model {

inline constexpr std::uint64_t kSeed = 20240611;

inline MixtralConfig TinyConfig() {
  MixtralConfig c;
  c.vocab_size = 11;
  c.hidden_size = 12;
  c.intermediate_size = 7;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 3;
  c.num_key_value_heads = 1;
  c.num_local_experts = 4;
  c.num_experts_per_tok = 2;
  c.max_position_embeddings = 16;
  c.initializer_range = 0.4;  // far from zero, so that every path matters
  c.router_aux_loss_coef = 0.3;
  c.output_router_logits = true;
  return c;
}

// Sequences of the given lengths with random tokens and uneven weights; labels are the next token.
inline data::Batch MakeBatch(const std::vector<std::int64_t>& lengths, std::int64_t vocab,
                             std::uint64_t first_token = 0, std::int64_t padding = 0) {
  data::Batch b;
  std::int64_t sum = 0;
  for (const std::int64_t n : lengths) sum += n;
  const std::int64_t tokens = sum + padding;
  b.sequences = ops::PackedFromLengths(lengths, tokens);
  b.first_token = static_cast<std::int64_t>(first_token);
  b.tokens = Tensor::Zeros({tokens}, DType::kI64);
  b.labels = Tensor::Empty({tokens}, DType::kI64);
  b.weights = Tensor::Zeros({tokens}, DType::kF32);
  const RandomStream stream(kSeed, "tokens");
  std::int64_t* token = b.tokens.data<std::int64_t>();
  std::int64_t* label = b.labels.data<std::int64_t>();
  float* weight = b.weights.data<float>();
  for (std::int64_t t = 0; t < tokens; ++t) label[t] = -100;
  std::int64_t t = 0;
  for (const std::int64_t n : lengths) {
    for (std::int64_t i = 0; i < n; ++i, ++t) {
      const std::uint64_t index = first_token + static_cast<std::uint64_t>(t);
      token[t] = static_cast<std::int64_t>(stream.Below(index, static_cast<std::uint64_t>(vocab)));
      if (i > 0) {
        label[t - 1] = token[t];
        weight[t - 1] = 0.5f + stream.Uniform(4 * index);
      }
    }
  }
  if (padding > 0) {
    b.token_mask = Tensor::Zeros({tokens}, DType::kU8);
    for (std::int64_t i = 0; i < sum; ++i) b.token_mask.data<std::uint8_t>()[i] = 1;
  }
  return b;
}

inline double WeightSum(const std::vector<data::Batch>& batches) {
  double sum = 0;
  for (const data::Batch& b : batches) {
    for (const float w : b.weights.span<float>()) sum += w;
  }
  return sum;
}

inline std::int64_t RoutedTokens(const std::vector<data::Batch>& batches) {
  std::int64_t n = 0;
  for (const data::Batch& b : batches) {
    const auto cu = b.sequences.cu_seqlens.span<std::int64_t>();
    n += cu.back();
  }
  return n;
}

// Loss of the global batch made of micro-batches, all that is trained; gradients are left in the
// store, sums in `sums`, optional.
inline double Loss(LocalMixtral& m, const std::vector<data::Batch>& batches,
                   LossSums* sums_out = nullptr, std::int64_t step = 1) {
  const ops::Context ctx;
  const MixtralConfig& c = m.model.config();
  const double weights = WeightSum(batches);
  const LossScale scale{Tensor::Scalar(1 / weights),
                        Tensor::Scalar(1 / static_cast<double>(RoutedTokens(batches)))};
  LossSums sums = LossSums::Zeros(ctx, c);
  StepNoise noise{kSeed, ctx.Empty({}, DType::kI64)};
  *noise.step.data<std::int64_t>() = step;
  m.store.ZeroGradients();
  for (const data::Batch& b : batches) m.model.TrainMicroBatch(b, scale, sums, noise);
  double loss = sums.weighted_nll.item() / weights;
  if (c.output_router_logits) loss += c.router_aux_loss_coef * sums.aux_loss.item();
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    loss += c.moe_aux_loss_coeff * ElementAsDouble(sums.layer_aux_loss, i) +
            c.moe_z_loss_coeff * ElementAsDouble(sums.z_loss, i);
  }
  if (sums_out != nullptr) *sums_out = sums;
  return loss;
}

inline std::vector<Tensor> Gradients(const LocalMixtral& m) {
  std::vector<Tensor> grads;
  for (const auto& p : m.store.parameters()) grads.push_back(p.grad.Clone());
  return grads;
}

}  // namespace cistron::model
