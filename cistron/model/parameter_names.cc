// Canonical names and shapes of a Mixtral's parameters.
#include "cistron/base/error.h"
#include "cistron/model/hugging_face.h"

namespace cistron::model {

std::vector<ParameterInfo> MixtralParameters(const MixtralConfig& c) {
  const std::int64_t q = c.num_attention_heads * c.HeadDim();
  const std::int64_t kv = c.num_key_value_heads * c.HeadDim();
  const std::int64_t h = c.hidden_size;
  std::vector<ParameterInfo> all;
  all.push_back({"model.embed_tokens.weight", {c.vocab_size, h}});
  for (std::int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    all.push_back({layer + "self_attn.q_proj.weight", {q, h}});
    all.push_back({layer + "self_attn.k_proj.weight", {kv, h}});
    all.push_back({layer + "self_attn.v_proj.weight", {kv, h}});
    all.push_back({layer + "self_attn.o_proj.weight", {h, q}});
    all.push_back({layer + "mlp.gate.weight", {c.num_local_experts, h}});
    all.push_back(
        {layer + "mlp.experts.gate_up_proj", {c.num_local_experts, 2 * c.intermediate_size, h}});
    all.push_back({layer + "mlp.experts.down_proj", {c.num_local_experts, h, c.intermediate_size}});
    if (c.n_shared_experts > 0) {
      const std::int64_t f = c.n_shared_experts * c.intermediate_size;
      all.push_back({layer + "mlp.shared_experts.gate_up_proj", {1, 2 * f, h}});
      all.push_back({layer + "mlp.shared_experts.down_proj", {1, h, f}});
    }
    all.push_back({layer + "input_layernorm.weight", {h}});
    all.push_back({layer + "post_attention_layernorm.weight", {h}});
  }
  all.push_back({"model.norm.weight", {h}});
  if (!c.tie_word_embeddings) all.push_back({"lm_head.weight", {c.vocab_size, h}});
  return all;
}

std::vector<ParameterInfo> MixtralBuffers(const MixtralConfig& c) {
  std::vector<ParameterInfo> all;
  for (std::int64_t i = 0; c.moe_router_enable_expert_bias && i < c.num_hidden_layers; ++i) {
    all.push_back({fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", i),
                   {c.num_local_experts}});
  }
  return all;
}

}  // namespace cistron::model
