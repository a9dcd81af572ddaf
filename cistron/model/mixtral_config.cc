#include "cistron/model/mixtral_config.h"

#include <algorithm>
#include <cmath>

#include "cistron/base/error.h"

namespace cistron::model {
namespace {

// No dimension of a real model comes near; products of two of them stay within 64 bits.
constexpr std::int64_t kLargestDimension = std::int64_t{1} << 31;
// Lists of parameters are made by layer and expert: no config may ask for billions of them.
constexpr std::int64_t kLargestCount = 100'000;
// More parameters than any memory holds; keeps every count below 2^63.
constexpr double kMostParameters = 1e15;

void CheckDimension(const char* field, std::int64_t value,
                    std::int64_t largest = kLargestDimension) {
  CISTRON_CHECK(value >= 1 && value <= largest,
                "Mixtral config: {} is {}; it must be between 1 and {}", field, value, largest);
}

void CheckTokenId(const char* field, const std::optional<std::int64_t>& id, std::int64_t vocab) {
  // Hugging Face configs use -1 for "none" in places; an id beyond the vocabulary is a mistake.
  CISTRON_CHECK(!id || (*id >= -1 && *id < vocab),
                "Mixtral config: {} is {}; it must be below vocab_size = {}, or null", field,
                id.value_or(0), vocab);
}

// Weights of one expert, of one layer without experts, and of both ends.
struct Counts {
  std::int64_t expert, attention, router, norms, embedding, head, layers, experts, active_experts;
};

Counts Count(const MixtralConfig& c) {
  const std::int64_t q = c.num_attention_heads * c.HeadDim();
  const std::int64_t kv = c.num_key_value_heads * c.HeadDim();
  return {.expert = 3 * c.hidden_size * c.intermediate_size,
          .attention = 2 * c.hidden_size * (q + kv),
          .router = c.hidden_size * c.num_local_experts,
          .norms = 2 * c.hidden_size,
          .embedding = c.vocab_size * c.hidden_size,
          .head = c.vocab_size * c.hidden_size,
          .layers = c.num_hidden_layers,
          .experts = c.num_local_experts,
          .active_experts = c.num_experts_per_tok};
}

}  // namespace

void Validate(const MixtralConfig& c) {
  CheckDimension("vocab_size", c.vocab_size);
  CheckDimension("hidden_size", c.hidden_size);
  CheckDimension("intermediate_size", c.intermediate_size);
  CheckDimension("num_hidden_layers", c.num_hidden_layers, kLargestCount);
  CheckDimension("num_attention_heads", c.num_attention_heads);
  CheckDimension("num_key_value_heads", c.num_key_value_heads);
  CheckDimension("num_local_experts", c.num_local_experts, kLargestCount);
  CheckDimension("num_experts_per_tok", c.num_experts_per_tok);
  CheckDimension("max_position_embeddings", c.max_position_embeddings);
  CISTRON_CHECK(
      c.head_dim || c.hidden_size % c.num_attention_heads == 0,
      "Mixtral config: hidden_size = {} is not divisible by num_attention_heads = {}; change "
      "one of them or give head_dim",
      c.hidden_size, c.num_attention_heads);
  CheckDimension("head_dim", c.HeadDim());
  CISTRON_CHECK(c.HeadDim() % 2 == 0,
                "Mixtral config: head_dim = {} is odd; rotary embeddings turn pairs of elements",
                c.HeadDim());
  CISTRON_CHECK(c.num_attention_heads % c.num_key_value_heads == 0,
                "Mixtral config: num_attention_heads = {} is not a multiple of num_key_value_heads "
                "= {}",
                c.num_attention_heads, c.num_key_value_heads);
  CISTRON_CHECK(c.num_experts_per_tok <= c.num_local_experts,
                "Mixtral config: num_experts_per_tok = {} exceeds num_local_experts = {}",
                c.num_experts_per_tok, c.num_local_experts);
  if (c.sliding_window) CheckDimension("sliding_window", *c.sliding_window);
  CISTRON_CHECK(std::isfinite(c.rope_theta) && c.rope_theta > 0,
                "Mixtral config: rope_theta is {}; it must be positive", c.rope_theta);
  CISTRON_CHECK(std::isfinite(c.rms_norm_eps) && c.rms_norm_eps >= 0,
                "Mixtral config: rms_norm_eps is {}; it must be 0 or more", c.rms_norm_eps);
  CISTRON_CHECK(std::isfinite(c.initializer_range) && c.initializer_range >= 0,
                "Mixtral config: initializer_range is {}; it must be 0 or more",
                c.initializer_range);
  CISTRON_CHECK(std::isfinite(c.router_aux_loss_coef) && c.router_aux_loss_coef >= 0,
                "Mixtral config: router_aux_loss_coef is {}; it must be 0 or more",
                c.router_aux_loss_coef);
  CheckTokenId("bos_token_id", c.bos_token_id, c.vocab_size);
  CheckTokenId("eos_token_id", c.eos_token_id, c.vocab_size);
  CheckTokenId("pad_token_id", c.pad_token_id, c.vocab_size);
  const double h = static_cast<double>(c.hidden_size);
  const double attention = 2.0 * h * static_cast<double>(c.HeadDim()) *
                           static_cast<double>(c.num_attention_heads + c.num_key_value_heads);
  const double experts =
      3.0 * h * static_cast<double>(c.intermediate_size) * static_cast<double>(c.num_local_experts);
  const double total = 2.0 * h * static_cast<double>(c.vocab_size) +
                       static_cast<double>(c.num_hidden_layers) * (attention + experts);
  CISTRON_CHECK(total < kMostParameters,
                "Mixtral config: these sizes make {:.3g} parameters, beyond any machine", total);
}

std::int64_t ParameterCount(const MixtralConfig& config) {
  const Counts n = Count(config);
  return n.embedding + (config.tie_word_embeddings ? 0 : n.head) + config.hidden_size +
         n.layers * (n.attention + n.router + n.norms + n.experts * n.expert);
}

std::int64_t ActiveParameterCount(const MixtralConfig& config) {
  const Counts n = Count(config);
  return ParameterCount(config) - n.layers * (n.experts - n.active_experts) * n.expert;
}

double TrainingFlopsPerToken(const MixtralConfig& config, std::int64_t length) {
  CISTRON_CHECK(length >= 1, "TrainingFlopsPerToken: length {} is below 1", length);
  const Counts n = Count(config);
  // The embedding is a look-up and norms are no products; a tied head is a product all the same.
  const double weights = static_cast<double>(
      n.head + n.layers * (n.attention + n.router + n.active_experts * n.expert));
  // Keys seen by the queries at 1 … length, min(i, window) each, on average.
  const std::int64_t window = std::min(config.sliding_window.value_or(length), length);
  const double keys = (0.5 * static_cast<double>(window) * static_cast<double>(window + 1) +
                       static_cast<double>(length - window) * static_cast<double>(window)) /
                      static_cast<double>(length);
  // Scores and weighted sum of values: two products of 2·D operations a key; backward twice that.
  const double attention = 12.0 * static_cast<double>(n.layers * config.num_attention_heads) *
                           static_cast<double>(config.HeadDim()) * keys;
  return 6.0 * weights + attention;
}

}  // namespace cistron::model
