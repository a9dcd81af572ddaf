#include "cistron/model/mixtral.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "cistron/nn/attention.h"
#include "cistron/nn/load_balancing_loss.h"
#include "cistron/nn/moe_layer.h"
#include "cistron/nn/rms_norm.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"
#include "cistron/ops/embedding/embedding.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/quant/autocast.h"
#include "cistron/tensor/trace.h"

namespace cistron::model {
namespace {

nn::MoeLayer::Config MoeConfig(const MixtralConfig& c, std::int64_t layer) {
  nn::MoeLayer::Config moe;
  moe.hidden = c.hidden_size;
  moe.ffn = c.intermediate_size;
  moe.router.score = c.scoring_func == ScoringFunc::kSigmoid ? ops::ScoreFunction::kSigmoid
                     : c.moe_router_pre_softmax ? ops::ScoreFunction::kSoftmaxBeforeTopK
                                                : ops::ScoreFunction::kSoftmaxAfterTopK;
  moe.router.num_experts = c.num_local_experts;
  moe.router.top_k = c.num_experts_per_tok;
  moe.router.num_groups = c.n_group;
  moe.router.groups_kept = c.topk_group;
  moe.router.normalize = c.norm_topk_prob;
  moe.router.routed_scaling = c.routed_scaling_factor;
  moe.expert_bias = c.moe_router_enable_expert_bias;
  moe.jitter = c.router_jitter_noise;
  moe.force_balance = c.moe_router_force_load_balancing;
  moe.layer = layer;
  moe.shared_ffn = c.n_shared_experts * c.intermediate_size;
  return moe;
}

ops::AttentionConfig AttentionOf(const MixtralConfig& c) {
  return {.num_heads = c.num_attention_heads,
          .num_kv_heads = c.num_key_value_heads,
          .head_dim = c.HeadDim(),
          .window = c.sliding_window.value_or(0)};
}

struct DecoderLayer {
  DecoderLayer(nn::ParameterStore& store, nn::TokenDispatcher& dispatcher, const MixtralConfig& c,
               std::int64_t layer, const std::string& prefix,
               std::shared_ptr<nn::RotaryTable> rotary)
      : attention(store, prefix + "self_attn.", c.hidden_size, AttentionOf(c), std::move(rotary)),
        moe(store, dispatcher, prefix + "mlp.", MoeConfig(c, layer)),
        input_norm(store, prefix + "input_layernorm.weight", c.hidden_size, c.rms_norm_eps),
        post_attention_norm(store, prefix + "post_attention_layernorm.weight", c.hidden_size,
                            c.rms_norm_eps) {}

  nn::SelfAttention attention;
  nn::MoeLayer moe;
  nn::RmsNorm input_norm, post_attention_norm;
};

// What a layer that backward computes again keeps: the MoE layer's input, or the stream before the
// layer.
struct KeptInput {
  Tensor x;
  std::int64_t bytes() const { return x.bytes(); }
};
constexpr const char* kRecomputed = "recomputed layer";

// The scope in force without records of amax: the first pass left them.
class SecondPass {
 public:
  SecondPass() {
    const quant::Autocast* scope = quant::Autocast::Current();
    if (scope == nullptr || !scope->options().record_amax) return;
    quant::AutocastOptions options = scope->options();
    options.record_amax = false;
    scope_.emplace(scope->recipe(), std::move(options));
  }

 private:
  std::optional<quant::Autocast> scope_;
};

}  // namespace

LossSums LossSums::Zeros(const ops::Context& ctx, const MixtralConfig& config) {
  return {ctx.Zeros({}, DType::kF64),
          ctx.Zeros({}, DType::kF64),
          ctx.Zeros({config.num_hidden_layers, config.num_local_experts}, DType::kI64),
          ctx.Zeros({config.num_hidden_layers}, DType::kI64),
          ctx.Zeros({config.num_hidden_layers}, DType::kF64),
          ctx.Zeros({config.num_hidden_layers}, DType::kF64)};
}

struct Mixtral::State {
  ops::Context ctx;
  MixtralConfig config;
  DType dtype;
  Recompute recompute = Recompute::kNone;
  nn::ParameterStore* store;
  nn::StatisticsReducer* reducer;
  nn::ParameterId embedding = -1;
  std::vector<DecoderLayer> layers;
  std::unique_ptr<nn::RmsNorm> norm;
  nn::ParameterId head = -1;  // the embedding's when tied

  std::vector<Tensor> given_experts;  // TakeExperts

  // What a pass through the decoder yields besides its last hidden states.
  struct Pass {
    Tensor hidden;  // [T, H], after the last norm
    std::vector<nn::MoeLayer::Routing> routing;
  };

  ops::PackedSequences AuxScopes(const data::Batch& batch) const {
    return config.aux_scope == AuxScope::kSequence ? batch.sequences : ops::PackedSequences{};
  }

  void CheckBatch(const data::Batch& batch) const {
    CISTRON_CHECK(batch.sequences.max_length <= config.max_position_embeddings,
                  "model: a sequence of {} tokens is longer than max_position_embeddings = {}; "
                  "raise model.max_position_embeddings or shorten data.seq_len",
                  batch.sequences.max_length, config.max_position_embeddings);
  }

  // The batch where the context's kernels read it, its values checked before: kernels cannot.
  data::Batch Place(const data::Batch& batch) const {
    CheckBatch(batch);
    if (ctx.allocator().device().type == DeviceType::kCpu) return batch;
    if (!OnHost(batch.tokens)) return batch;
    CheckTokens(batch);
    data::Batch placed = batch;
    for (Tensor* t : {&placed.tokens, &placed.labels, &placed.weights, &placed.token_mask,
                      &placed.sequences.cu_seqlens, &placed.sequences.positions}) {
      *t = ctx.Place(*t);
    }
    return placed;
  }

  void CheckTokens(const data::Batch& batch) const {
    const auto tokens = batch.tokens.span<std::int64_t>();
    const auto labels = batch.labels.span<std::int64_t>();
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      CISTRON_CHECK(tokens[t] >= 0 && tokens[t] < config.vocab_size,
                    "model: token {} at position {} is outside the vocabulary [0, {})", tokens[t],
                    t, config.vocab_size);
      CISTRON_CHECK(
          labels[t] == ops::kIgnoreLabel || (labels[t] >= 0 && labels[t] < config.vocab_size),
          "model: label {} at position {} is neither {} (ignored) nor in [0, {})", labels[t], t,
          ops::kIgnoreLabel, config.vocab_size);
    }
  }

  // Whether what this choice leaves out is kept from forward.
  bool Keeps(Recompute choice) const { return recompute < choice; }
  static nn::Saved* Drop(const nn::Saved* saved, nn::Saved& dropped) {
    return saved == nullptr ? nullptr : &dropped;
  }

  nn::MoeLayer::Noise JitterNoise(const data::Batch& batch, const StepNoise& noise) const {
    CISTRON_CHECK(config.router_jitter_noise == 0 || noise.step,
                  "model: router_jitter_noise = {} needs the seed and the step of the run",
                  config.router_jitter_noise);
    CISTRON_CHECK(!config.moe_router_force_load_balancing || noise.step,
                  "model: moe_router_force_load_balancing needs the seed and the step of the run");
    return {noise.seed, noise.step, batch.first_token};
  }

  // `noise` null: no training, and no statistics.
  Pass Forward(const data::Batch& batch, const StepNoise* noise, nn::Saved* saved) const {
    using Statistics = nn::MoeLayer::Statistics;
    const Statistics statistics = noise == nullptr              ? Statistics::kNone
                                  : config.moe_z_loss_coeff > 0 ? Statistics::kLoadAndZ
                                                                : Statistics::kLoad;
    const nn::MoeLayer::Noise jitter =
        noise == nullptr ? nn::MoeLayer::Noise{} : JitterNoise(batch, *noise);
    const ops::PackedSequences scopes = AuxScopes(batch);
    Pass pass;
    pass.routing.resize(layers.size());
    for (std::size_t i = 0; i < given_experts.size(); ++i) {
      pass.routing[i].router.experts = given_experts[i];
    }
    Tensor x = ctx.Empty({batch.num_tokens(), config.hidden_size}, dtype);
    {
      const nn::AcquiredWeight w(*store, embedding);
      ops::EmbeddingForward(ctx, batch.tokens, w.tensor(), ops::Write(x));
    }
    Tensor residual;  // the stream before x is added to it; undefined before the first layer
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const DecoderLayer& layer = layers[i];
      // Filled all the same: the pass is the one that backward repeats.
      nn::Saved dropped = nn::Saved::Dropped();
      nn::Saved* const attention_saved = Keeps(Recompute::kLayer) ? saved : Drop(saved, dropped);
      nn::Saved* const moe_saved = Keeps(Recompute::kMoe) ? saved : Drop(saved, dropped);
      const TraceRange range("layers.", static_cast<std::int64_t>(i));
      const auto before_attention = layer.input_norm.Forward(ctx, x, residual, attention_saved);
      x = layer.attention.Forward(ctx, before_attention.y, batch.sequences, attention_saved);
      const auto before_moe =
          layer.post_attention_norm.Forward(ctx, x, before_attention.h, attention_saved);
      x = layer.moe.Forward(ctx, before_moe.y, batch.token_mask, scopes, statistics, jitter,
                            pass.routing[i], moe_saved);
      residual = before_moe.h;
      if (saved != nullptr && recompute != Recompute::kNone) {
        saved->Push<KeptInput>(&layer, kRecomputed).x =
            recompute == Recompute::kLayer ? before_attention.h : before_moe.y;
      }
    }
    pass.hidden = norm->Forward(ctx, x, residual, saved).y;
    return pass;
  }

  // Repeats the forward pass of a layer, or of its MoE layer alone, and saves all of it; the
  // statistics are those of the first pass.
  void ForwardAgain(const data::Batch& batch, const ops::PackedSequences& scopes,
                    const StepNoise& noise, const DecoderLayer& layer, nn::Saved& saved,
                    nn::Saved& again) const {
    const SecondPass second;
    const TraceRange range("recompute");
    Tensor x = saved.Pop<KeptInput>(&layer, kRecomputed).x;
    if (recompute == Recompute::kLayer) {
      const auto before_attention = layer.input_norm.Forward(ctx, x, Tensor(), &again);
      x = layer.attention.Forward(ctx, before_attention.y, batch.sequences, &again);
      x = layer.post_attention_norm.Forward(ctx, x, before_attention.h, &again).y;
    }
    nn::MoeLayer::Routing routing;
    layer.moe.Forward(ctx, x, batch.token_mask, scopes, nn::MoeLayer::Statistics::kNone,
                      JitterNoise(batch, noise), routing, &again);
  }

  // `gradients`: of each layer.
  void Backward(const data::Batch& batch, const StepNoise& noise, const Tensor& dhidden,
                const std::vector<nn::MoeLayer::StatisticsGradients>& gradients,
                nn::Saved& saved) const {
    const ops::PackedSequences scopes = AuxScopes(batch);
    // dstream is the gradient of the residual stream, which is also that of the branch added last.
    Tensor dstream = norm->Backward(ctx, dhidden, Tensor(), saved);
    for (std::size_t i = layers.size(); i-- > 0;) {
      const DecoderLayer& layer = layers[i];
      const TraceRange range("layers.", static_cast<std::int64_t>(i), ".backward");
      nn::Saved again;
      if (recompute != Recompute::kNone) ForwardAgain(batch, scopes, noise, layer, saved, again);
      nn::Saved& of_moe = Keeps(Recompute::kMoe) ? saved : again;
      nn::Saved& of_attention = Keeps(Recompute::kLayer) ? saved : again;
      Tensor dy = layer.moe.Backward(ctx, dstream, batch.token_mask, scopes, gradients[i], of_moe);
      dstream = layer.post_attention_norm.Backward(ctx, dy, dstream, of_attention);
      dy = layer.attention.Backward(ctx, dstream, batch.sequences, of_attention);
      dstream = layer.input_norm.Backward(ctx, dy, dstream, of_attention);
      store->GradientsWritten();
    }
    ops::EmbeddingBackward(ctx, batch.tokens, dstream, store->GradientOutput(embedding));
  }

  // Sums router statistics into the step's and over ranks; returns the gradients of the auxiliary
  // losses with respect to them, undefined where a loss is not trained.
  std::vector<nn::MoeLayer::StatisticsGradients> Statistics(const Pass& pass,
                                                            const LossScale& scale,
                                                            LossSums& sums) const {
    std::vector<ops::RouterOutputs> stats;
    std::vector<Tensor> shared;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const ops::RouterOutputs& r = pass.routing[i].router;
      ops::AddCounts(ctx, r.counts, sums.expert_counts.Select(static_cast<std::int64_t>(i)));
      ops::AddCounts(ctx, r.nonfinite_tokens,
                     sums.nonfinite_tokens.Select(static_cast<std::int64_t>(i)));
      for (const Tensor& t : {r.counts, r.score_sums, r.z_sums}) {
        if (t) shared.push_back(t);
      }
      stats.push_back(r);
    }
    if (config.aux_scope == AuxScope::kBatch) reducer->Sum(shared);
    const std::int64_t top_k = config.num_experts_per_tok;
    const double coefficient = config.output_router_logits ? config.router_aux_loss_coef : 0.0;
    const nn::LoadBalancingLoss loss =
        nn::ComputeLoadBalancingLoss(ctx, stats, top_k, coefficient, scale.inv_tokens);
    ops::AddTo(ctx, loss.value, sums.aux_loss);

    std::vector<nn::MoeLayer::StatisticsGradients> gradients(layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const auto layer = static_cast<std::int64_t>(i);
      if (coefficient != 0) gradients[i].score_sums = loss.score_grad;
      if (config.moe_aux_loss_coeff > 0) {
        const nn::LoadBalancingLoss own = nn::ComputeLayerLoadBalancingLoss(
            ctx, stats[i], top_k, config.moe_aux_loss_coeff, scale.inv_tokens);
        ops::AddTo(ctx, own.value, sums.layer_aux_loss.Select(layer));
        if (coefficient != 0) ops::AddTo(ctx, loss.score_grad, own.score_grad);
        gradients[i].score_sums = own.score_grad;
      }
      if (config.moe_z_loss_coeff > 0) {
        const nn::RouterZLoss z =
            nn::ComputeRouterZLoss(ctx, stats[i], config.moe_z_loss_coeff, scale.inv_tokens);
        ops::AddTo(ctx, z.value, sums.z_loss.Select(layer));
        gradients[i].z_sums = z.grad;
      }
    }
    return gradients;
  }
};

Mixtral::Mixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
                 nn::ParameterStore& store, nn::TokenDispatcher& dispatcher,
                 nn::StatisticsReducer& statistics)
    : state_(std::make_unique<State>()) {
  Validate(config);
  State& s = *state_;
  s.ctx = ctx;
  s.config = config;
  s.dtype = dtype;
  s.store = &store;
  s.reducer = &statistics;
  s.embedding = store.Register({.name = "model.embed_tokens.weight",
                                .shape = {config.vocab_size, config.hidden_size},
                                .is_embedding = true});
  const auto rotary =
      std::make_shared<nn::RotaryTable>(config.HeadDim(), config.rope_theta, ComputeType(dtype));
  s.layers.reserve(static_cast<std::size_t>(config.num_hidden_layers));
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    s.layers.emplace_back(store, dispatcher, config, i, fmt::format("model.layers.{}.", i), rotary);
  }
  s.norm = std::make_unique<nn::RmsNorm>(store, "model.norm.weight", config.hidden_size,
                                         config.rms_norm_eps);
  s.head = config.tie_word_embeddings
               ? s.embedding
               : store.Register({.name = "lm_head.weight",
                                 .shape = {config.vocab_size, config.hidden_size},
                                 .wide_gradient = true});
}

Mixtral::~Mixtral() = default;

const MixtralConfig& Mixtral::config() const {
  return state_->config;
}

void Mixtral::SetRecompute(Recompute recompute) {
  state_->recompute = recompute;
}

void Mixtral::SumOverRanks(const LossSums& sums) {
  std::vector<Tensor> own = {sums.weighted_nll, sums.expert_counts, sums.nonfinite_tokens};
  // Losses of the whole batch are the same on every rank already.
  if (state_->config.aux_scope == AuxScope::kSequence) {
    own.insert(own.end(), {sums.aux_loss, sums.layer_aux_loss, sums.z_loss});
  }
  if (sums.overflow) own.push_back(sums.overflow);
  state_->reducer->Sum(own);
}

void Mixtral::UpdateExpertBias(const LossSums& sums, const Tensor& gate) {
  const State& s = *state_;
  if (!s.config.moe_router_enable_expert_bias) return;
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    ops::UpdateExpertBias(s.ctx, sums.expert_counts.Select(static_cast<std::int64_t>(i)),
                          s.config.moe_router_bias_update_rate, s.layers[i].moe.expert_bias(),
                          gate);
  }
}

void Mixtral::TrainMicroBatch(const data::Batch& given, const LossScale& scale, LossSums& sums,
                              const StepNoise& noise) {
  const State& s = *state_;
  const data::Batch batch = s.Place(given);
  nn::Saved saved;
  State::Pass pass = s.Forward(batch, &noise, &saved);
  const auto gradients = s.Statistics(pass, scale, sums);

  const Tensor nll = s.ctx.Empty({batch.num_tokens()}, ComputeType(s.dtype));
  const Tensor dhidden = s.ctx.Empty(pass.hidden.shape(), s.dtype);
  {
    const TraceRange range("cross_entropy");
    const nn::AcquiredWeight w(*s.store, s.head);
    ops::LinearCrossEntropy(s.ctx, {.x = pass.hidden,
                                    .w = w.tensor(),
                                    .labels = batch.labels,
                                    .weights = batch.weights,
                                    .nll = nll,
                                    .grad_scale = scale.inv_weight_sum,
                                    .dx = ops::Write(dhidden),
                                    .dw = s.store->GradientOutput(s.head)});
  }
  ops::WeightedSum(s.ctx, nll, batch.weights, ops::Accumulate(sums.weighted_nll));
  pass = {};
  s.Backward(batch, noise, dhidden, gradients, saved);
}

void Mixtral::CheckBatch(const data::Batch& batch) const {
  state_->CheckBatch(batch);
  state_->CheckTokens(batch);
}

Tensor Mixtral::Evaluate(const data::Batch& given, Tensor* experts) {
  const State& s = *state_;
  const data::Batch batch = s.Place(given);
  const State::Pass pass = s.Forward(batch, nullptr, nullptr);
  Tensor nll = s.ctx.Empty({batch.num_tokens()}, ComputeType(s.dtype));
  const nn::AcquiredWeight w(*s.store, s.head);
  ops::LinearCrossEntropy(s.ctx, {.x = pass.hidden,
                                  .w = w.tensor(),
                                  .labels = batch.labels,
                                  .weights = batch.weights,
                                  .nll = nll,
                                  .grad_scale = {},
                                  .dx = {},
                                  .dw = {}});
  if (experts != nullptr) {
    const std::int64_t layers = s.config.num_hidden_layers;
    *experts = s.ctx.Empty({layers, batch.num_tokens(), s.config.num_experts_per_tok}, DType::kI32);
    for (std::int64_t i = 0; i < layers; ++i) {
      Convert(pass.routing[static_cast<std::size_t>(i)].router.experts, experts->Select(i));
    }
    *experts = experts->ToHost();
  }
  return nll.ToHost();
}

namespace {

// Texts and the layers that have them, of which the text says "layers.*.".
class TextsOfLayers {
 public:
  void Add(std::size_t layer, std::string text) {
    const std::string here = fmt::format("layers.{}.", layer);
    for (std::size_t at = 0; (at = text.find(here, at)) != std::string::npos;) {
      text.replace(at, here.size(), "layers.*.");
    }
    const auto same = std::find_if(entries_.begin(), entries_.end(),
                                   [&](const Entry& e) { return e.text == text; });
    (same == entries_.end() ? entries_.emplace_back(Entry{std::move(text), {}}) : *same)
        .layers.push_back(layer);
  }
  std::vector<std::string> Join(const char* separator) const {
    std::vector<std::string> all;
    for (const Entry& e : entries_) {
      all.push_back(fmt::format("layers {}:{}{}", fmt::join(e.layers, ", "), separator, e.text));
    }
    return all;
  }

 private:
  struct Entry {
    std::string text;
    std::vector<std::size_t> layers;
  };
  std::vector<Entry> entries_;
};

}  // namespace

std::string Mixtral::ExplainExperts() const {
  const ops::Context ctx = state_->ctx.WithStrict(false);
  TextsOfLayers texts;
  for (std::size_t i = 0; i < state_->layers.size(); ++i) {
    const nn::MoeLayer& moe = state_->layers[i].moe;
    std::string text = moe.experts().Explain(ctx, state_->dtype);
    if (moe.shared_expert() != nullptr) text += moe.shared_expert()->Explain(ctx, state_->dtype);
    texts.Add(i, std::move(text));
  }
  return fmt::format("{}", fmt::join(texts.Join("\n"), ""));
}

std::vector<std::string> Mixtral::FusionRefusals() const {
  const ops::Context ctx = state_->ctx.WithStrict(false);
  TextsOfLayers texts;
  for (std::size_t i = 0; i < state_->layers.size(); ++i) {
    const nn::MoeLayer& moe = state_->layers[i].moe;
    for (const nn::Sequential* mlp : {&moe.experts(), moe.shared_expert()}) {
      if (mlp == nullptr) continue;
      const nn::fuse::Plan plan = mlp->MakePlan(ctx, state_->dtype, /*training=*/true);
      for (std::string& line : nn::fuse::DescribeRefusals(plan)) texts.Add(i, std::move(line));
    }
  }
  return texts.Join(" ");
}

void Mixtral::TakeExperts(std::vector<Tensor> experts) {
  CISTRON_CHECK(experts.empty() || experts.size() == state_->layers.size(),
                "model: experts of {} layers are given to {}", experts.size(),
                state_->layers.size());
  CISTRON_CHECK(experts.empty() || state_->recompute == Recompute::kNone,
                "model: experts are given, and a recomputation would choose its own");
  state_->given_experts = std::move(experts);
}

Mixtral::Logits Mixtral::ComputeLogits(const data::Batch& given) {
  const State& s = *state_;
  const data::Batch batch = s.Place(given);
  const State::Pass pass = s.Forward(batch, nullptr, nullptr);
  Logits out;
  out.logits = s.ctx.Empty({batch.num_tokens(), s.config.vocab_size}, ComputeType(s.dtype));
  const nn::AcquiredWeight w(*s.store, s.head);
  ops::Gemm(s.ctx, pass.hidden, ops::Transpose::kNo, w.tensor(), ops::Transpose::kYes,
            ops::Write(out.logits));
  out.logits = out.logits.ToHost();
  for (const auto& routing : pass.routing) {
    out.router_logits.push_back(routing.logits.ToHost());
    out.experts.push_back(routing.router.experts.ToHost());
  }
  return out;
}

}  // namespace cistron::model
