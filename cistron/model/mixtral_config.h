// Configuration of a Mixtral model, by Hugging Face's names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cistron::model {

// The release of transformers whose files are written: readers compare it with their own.
inline constexpr const char* kTransformersVersion = "5.17.0";

enum class AuxScope { kBatch, kSequence };
enum class ScoringFunc { kSoftmax, kSigmoid };

// What backward computes again instead of keeping it from forward; results are the same bits.
enum class Recompute {
  kNone,
  kMoe,    // the MoE layers: their input is kept
  kLayer,  // whole layers: the residual stream before each is kept
};

struct MixtralConfig {
  std::int64_t vocab_size = 256;
  std::int64_t hidden_size = 128;
  std::int64_t intermediate_size = 256;
  std::int64_t num_hidden_layers = 4;
  std::int64_t num_attention_heads = 4;
  std::int64_t num_key_value_heads = 2;
  std::optional<std::int64_t> head_dim;  // null: hidden_size / num_attention_heads
  std::int64_t num_local_experts = 8;
  std::int64_t num_experts_per_tok = 2;
  std::int64_t max_position_embeddings = 4096;
  std::optional<std::int64_t> sliding_window;
  double rope_theta = 1e6;
  double rms_norm_eps = 1e-5;
  double initializer_range = 0.02;
  double router_aux_loss_coef = 0.001;
  bool output_router_logits = false;  // true: the auxiliary loss is part of the training loss
  bool tie_word_embeddings = false;
  std::optional<std::int64_t> bos_token_id, eos_token_id, pad_token_id;
  // Fields of a config.json that we read past and write back unchanged, as a JSON object.
  std::string extra_json = "{}";

  // Of the router, by the names of Hugging Face (Mixtral's jitter; DeepSeek-V3's others) or of
  // Megatron-LM (moe_*). The defaults are Mixtral; docs/router.md has the formulas.
  double router_jitter_noise = 0;  // the MoE block's input times U(1 − j, 1 + j), in training
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  bool moe_router_pre_softmax = false;  // softmax over all experts, before top-k, not renormalised
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1;
  std::int64_t n_group = 1, topk_group = 1;    // groups of experts, and those that a token may use
  bool moe_router_enable_expert_bias = false;  // loss-free balancing
  double moe_router_bias_update_rate = 1e-3;
  double moe_aux_loss_coeff = 0;  // one load-balancing loss a layer (Megatron's definition)
  double moe_z_loss_coeff = 0;
  // To measure: training chooses experts at random, as evenly as a trained router would.
  bool moe_router_force_load_balancing = false;
  std::int64_t n_shared_experts = 0;  // one dense MLP of n_shared_experts · intermediate_size

  // Cistron's own: over what the auxiliary losses take their statistics.
  AuxScope aux_scope = AuxScope::kBatch;

  bool trains_hf_aux_loss() const { return output_router_logits && router_aux_loss_coef != 0; }
  std::int64_t HeadDim() const { return head_dim.value_or(hidden_size / num_attention_heads); }
};

// Throws kInvalidArgument naming the field, its value and what is allowed.
void Validate(const MixtralConfig& config);
// What Validate would say of the router's options and the ids of tokens: all that is wrong, one
// sentence each, but not what follows from another or from sizes that do not fit.
std::vector<std::string> OptionFaults(const MixtralConfig& config);

// Options of this config that change what the weights compute and that Hugging Face's Mixtral does
// not have, as "scoring_func = sigmoid"; empty when transformers would compute the same.
std::vector<std::string> OptionsThatMixtralLacks(const MixtralConfig& config);

// Reads the text of a config.json (rope_theta or rope_parameters, torch_dtype or dtype,
// null or missing head_dim and sliding_window). Refuses by name what is not done: other model
// types, rope types, activations, attention dropout. `origin` names the file in errors. `dtype`,
// optional, receives the stored dtype's name ("float32").
MixtralConfig ParseMixtralConfig(const std::string& json, const std::string& origin,
                                 std::string* dtype = nullptr);

// A config.json as save_pretrained would write it, extra fields kept. `dtype`: "float32" or
// "bfloat16".
std::string ToJson(const MixtralConfig& config, const std::string& dtype);

// Parameters in all, and those that one token uses.
std::int64_t ParameterCount(const MixtralConfig& config);
std::int64_t ActiveParameterCount(const MixtralConfig& config);
// Floating-point operations of forward and backward for one token of a sequence of `length`: 6 per
// active matrix weight, and the attention scores (causal, sliding window respected).
double TrainingFlopsPerToken(const MixtralConfig& config, std::int64_t length);

}  // namespace cistron::model
