#include "cistron/model/mixtral_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

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

// Sentences about what does not hold.
struct Faults {
  template <class... Args>
  bool Need(bool holds, fmt::format_string<Args...> text, Args&&... args) {
    if (!holds)
      texts.push_back("Mixtral config: " + fmt::format(text, std::forward<Args>(args)...));
    return holds;
  }
  std::vector<std::string> texts;
};

// Fields that are numbers of their own.
void FindRangeFaults(const MixtralConfig& c, Faults& faults) {
  faults.Need(c.router_jitter_noise >= 0 && c.router_jitter_noise < 1,
              "router_jitter_noise is {}; it must be in [0, 1)", c.router_jitter_noise);
  faults.Need(std::isfinite(c.routed_scaling_factor) && c.routed_scaling_factor > 0,
              "routed_scaling_factor is {}; it must be positive", c.routed_scaling_factor);
  for (const auto& [field, value] :
       {std::pair{"moe_router_bias_update_rate", c.moe_router_bias_update_rate},
        {"moe_aux_loss_coeff", c.moe_aux_loss_coeff},
        {"moe_z_loss_coeff", c.moe_z_loss_coeff}}) {
    faults.Need(std::isfinite(value) && value >= 0, "{} is {}; it must be 0 or more", field, value);
  }
  faults.Need(c.n_shared_experts >= 0 && c.n_shared_experts <= kLargestCount,
              "n_shared_experts is {}; it must be between 0 and {}", c.n_shared_experts,
              kLargestCount);
  // Hugging Face configs use -1 for "none" in places; an id beyond the vocabulary is a mistake.
  for (const auto& [field, id] : {std::pair{"bos_token_id", c.bos_token_id},
                                  {"eos_token_id", c.eos_token_id},
                                  {"pad_token_id", c.pad_token_id}}) {
    faults.Need(!id || (*id >= -1 && *id < c.vocab_size),
                "{} is {}; it must be below vocab_size = {}, or null", field, id.value_or(0),
                c.vocab_size);
  }
}

void FindGroupFaults(const MixtralConfig& c, Faults& faults) {
  bool fits = true;
  for (const auto& [field, value] :
       {std::pair{"n_group", c.n_group}, {"topk_group", c.topk_group}}) {
    fits &= faults.Need(value >= 1 && value <= kLargestCount,
                        "{} is {}; it must be between 1 and {}", field, value, kLargestCount);
  }
  if (!fits) return;
  fits = faults.Need(c.topk_group <= c.n_group,
                     "topk_group = {} exceeds n_group = {}; lower the one or raise the other",
                     c.topk_group, c.n_group);
  if (c.n_group == 1) return;
  faults.Need(c.scoring_func == ScoringFunc::kSigmoid,
              "n_group = {} needs scoring_func = sigmoid; set it, or n_group = 1", c.n_group);
  fits &= faults.Need(c.num_local_experts % c.n_group == 0,
                      "n_group = {} does not divide num_local_experts = {}; change one of them",
                      c.n_group, c.num_local_experts);
  fits &=
      faults.Need(c.num_experts_per_tok % c.topk_group == 0,
                  "topk_group = {} does not divide num_experts_per_tok = {}; change one of them",
                  c.topk_group, c.num_experts_per_tok);
  if (!fits || c.num_experts_per_tok > c.num_local_experts) return;
  faults.Need(c.num_experts_per_tok / c.topk_group <= c.num_local_experts / c.n_group,
              "groups of {} experts (num_local_experts / n_group) do not hold the {} that a token "
              "takes of each (num_experts_per_tok / topk_group); lower num_experts_per_tok or "
              "n_group, or raise topk_group",
              c.num_local_experts / c.n_group, c.num_experts_per_tok / c.topk_group);
}

// Weights of one expert, of one layer without experts, and of both ends.
struct Counts {
  std::int64_t expert, shared, attention, router, norms, embedding, head, layers, experts,
      active_experts;
};

Counts Count(const MixtralConfig& c) {
  const std::int64_t q = c.num_attention_heads * c.HeadDim();
  const std::int64_t kv = c.num_key_value_heads * c.HeadDim();
  return {.expert = 3 * c.hidden_size * c.intermediate_size,
          .shared = 3 * c.hidden_size * c.intermediate_size * c.n_shared_experts,
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

std::vector<std::string> OptionFaults(const MixtralConfig& c) {
  const bool sigmoid = c.scoring_func == ScoringFunc::kSigmoid;
  Faults faults;
  FindRangeFaults(c, faults);
  if (faults.Need(
          !c.moe_router_pre_softmax || !sigmoid,
          "moe_router_pre_softmax = true is for scoring_func = softmax, not sigmoid; set one of "
          "them otherwise")) {
    faults.Need(!c.moe_router_pre_softmax || !c.norm_topk_prob,
                "moe_router_pre_softmax takes the probabilities of the softmax over all experts as "
                "they are; set norm_topk_prob = false (renormalised, they are those of the softmax "
                "after top-k, moe_router_pre_softmax = false)");
  }
  faults.Need(sigmoid || !c.moe_router_enable_expert_bias,
              "moe_router_enable_expert_bias = true needs scoring_func = sigmoid; set it, or "
              "moe_router_enable_expert_bias = false");
  FindGroupFaults(c, faults);
  return std::move(faults.texts);
}

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
  if (const auto faults = OptionFaults(c); !faults.empty()) CISTRON_CHECK(false, "{}", faults[0]);
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
  const double h = static_cast<double>(c.hidden_size);
  const double attention = 2.0 * h * static_cast<double>(c.HeadDim()) *
                           static_cast<double>(c.num_attention_heads + c.num_key_value_heads);
  const double experts = 3.0 * h * static_cast<double>(c.intermediate_size) *
                         static_cast<double>(c.num_local_experts + c.n_shared_experts);
  const double total = 2.0 * h * static_cast<double>(c.vocab_size) +
                       static_cast<double>(c.num_hidden_layers) * (attention + experts);
  CISTRON_CHECK(total < kMostParameters,
                "Mixtral config: these sizes make {:.3g} parameters, beyond any machine", total);
}

std::vector<std::string> OptionsThatMixtralLacks(const MixtralConfig& c) {
  std::vector<std::string> names;
  if (c.scoring_func == ScoringFunc::kSigmoid) names.push_back("scoring_func = sigmoid");
  if (c.moe_router_pre_softmax) names.push_back("moe_router_pre_softmax = true");
  if (!c.norm_topk_prob) names.push_back("norm_topk_prob = false");
  if (c.routed_scaling_factor != 1) {
    names.push_back(fmt::format("routed_scaling_factor = {}", c.routed_scaling_factor));
  }
  if (c.n_group != 1) names.push_back(fmt::format("n_group = {}", c.n_group));
  if (c.moe_router_enable_expert_bias) names.push_back("moe_router_enable_expert_bias = true");
  if (c.n_shared_experts != 0) {
    names.push_back(fmt::format("n_shared_experts = {}", c.n_shared_experts));
  }
  return names;
}

std::int64_t ParameterCount(const MixtralConfig& config) {
  const Counts n = Count(config);
  return n.embedding + (config.tie_word_embeddings ? 0 : n.head) + config.hidden_size +
         n.layers * (n.attention + n.router + n.norms + n.experts * n.expert + n.shared);
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
      n.head + n.layers * (n.attention + n.router + n.active_experts * n.expert + n.shared));
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
