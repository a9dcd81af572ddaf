// The Mixtral decoder: embedding, layers of attention and mixture of experts, norm, head.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/nn/parameter.h"
#include "cistron/nn/statistics_reducer.h"
#include "cistron/nn/token_dispatcher.h"
#include "cistron/ops/context.h"

namespace cistron::model {

// Sums over the micro-batches of a step, on the device; read them once, after the step.
struct LossSums {
  Tensor weighted_nll;      // f64 []: Σ weight · nll
  Tensor aux_loss;          // f64 []: Σ (tokens of the scope / tokens of the global batch) · aux
  Tensor expert_counts;     // i64 [L, E]: assignments
  Tensor nonfinite_tokens;  // i64 [L]: tokens whose router logits are not finite
  // Of each layer, without coefficients; zeros where the config does not train them.
  Tensor layer_aux_loss;  // f64 [L]: moe_aux_loss_coeff's
  Tensor z_loss;          // f64 [L]: moe_z_loss_coeff's
  // f64 []: infinity where rows did not fit the buffers of the rank with their experts, so that the
  // step has to be made again; undefined: nobody asks.
  Tensor overflow{};

  static LossSums Zeros(const ops::Context& ctx, const MixtralConfig& config);
};

// Denominators of the global batch, as device scalars, so that a captured step reads them anew.
struct LossScale {
  Tensor inv_weight_sum;  // f64 []: 1 / Σ weights of the global batch
  Tensor inv_tokens;      // f64 []: 1 / routed tokens of the global batch
};

// What the random numbers of a step are functions of, besides layer, token and element. Only
// router_jitter_noise draws any.
struct StepNoise {
  std::uint64_t seed = 0;
  Tensor step{};  // i64 []: which update of the run, on the device
};

class Mixtral {
 public:
  // Registers its parameters, in canonical order, with the store. The store, dispatcher and reducer
  // must outlive the model.
  Mixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
          nn::ParameterStore& store, nn::TokenDispatcher& dispatcher,
          nn::StatisticsReducer& statistics);
  ~Mixtral();

  const MixtralConfig& config() const;

  // From the next TrainMicroBatch on. Statistics, histories of delayed scaling and biases move once
  // a step all the same.
  void SetRecompute(Recompute recompute);

  // Forward and backward of one micro-batch: gradients of the global mean loss go to the store;
  // sums are added to `sums`. The loss is Σ w·nll / Σ w, plus router_aux_loss_coef · aux where
  // config.output_router_logits is set, plus moe_aux_loss_coeff and moe_z_loss_coeff times the
  // layers' own losses; micro-batches weigh in auxiliary losses by their tokens.
  void TrainMicroBatch(const data::Batch& batch, const LossScale& scale, LossSums& sums,
                       const StepNoise& noise = {});

  // After the last micro-batch of a step: `sums` become those of all ranks, with the same bits on
  // each. Nothing on one rank.
  void SumOverRanks(const LossSums& sums);

  // Loss-free balancing, after an optimiser step: moves each layer's bias by the assignments of the
  // global batch, sums.expert_counts of all ranks. Nothing without moe_router_enable_expert_bias,
  // nor where `gate` (f64 [], optional) is NaN.
  void UpdateExpertBias(const LossSums& sums, const Tensor& gate = {});

  // How the fuser runs the experts of the layers in training under the recipes in force: each plan
  // with the layers that follow it.
  std::string ExplainExperts() const;
  // What Context::strict() refuses of that, a line each; empty where every fusion fires.
  std::vector<std::string> FusionRefusals() const;

  // Whoever trains on a batch that lies on a device has checked it on the host, where kernels
  // cannot: throws where a token, a label or a length does not fit the model.
  void CheckBatch(const data::Batch& batch) const;

  // Batches lie on the host, and so do the results of Evaluate and ComputeLogits.

  // Forward only: nll of every label, [T] in the compute type (0 where ignored). `experts`,
  // optional, receives the routing, i32 [L, T, K].
  Tensor Evaluate(const data::Batch& batch, Tensor* experts = nullptr);

  // Forward only, whole logits [T, V] and router logits [T, E] of each layer, for verification.
  struct Logits {
    Tensor logits;
    std::vector<Tensor> router_logits;
    std::vector<Tensor> experts;  // i32 [T, K] a layer
  };
  Logits ComputeLogits(const data::Batch& batch);

  // Passes from now on take these experts [T, K], a layer each, instead of choosing: those of
  // another run, to be compared with. None: they choose. For the router of the implementation
  // `ref`.
  void TakeExperts(std::vector<Tensor> experts);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::model
