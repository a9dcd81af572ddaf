// The Mixtral decoder: embedding, layers of attention and mixture of experts, norm, head.
#pragma once

#include <memory>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/nn/parameter.h"
#include "cistron/nn/statistics_reducer.h"
#include "cistron/nn/token_dispatcher.h"
#include "cistron/ops/context.h"

namespace cistron::model {

// Sums over the micro-batches of a step (f64 unless said); add one step's and divide by its totals.
struct LossSums {
  double weighted_nll = 0;            // Σ weight · nll
  double aux_loss = 0;                // auxiliary loss, unscaled by its coefficient, weighted by tokens
  std::vector<std::int64_t> expert_counts;  // [L · E] assignments
  std::int64_t nonfinite_layer = -1;  // first layer with a token whose router logits are not finite
};

// Denominators of the global batch, as device scalars, so that a captured step reads them anew.
struct LossScale {
  Tensor inv_weight_sum;  // f64 []: 1 / Σ weights of the global batch
  Tensor inv_tokens;      // f64 []: 1 / routed tokens of the global batch
};

class Mixtral {
 public:
  // Registers its parameters, in canonical order, with the store. The store, dispatcher and reducer must
  // outlive the model.
  Mixtral(const ops::Context& ctx, const MixtralConfig& config, DType dtype,
          nn::ParameterStore& store, nn::TokenDispatcher& dispatcher,
          nn::StatisticsReducer& statistics);
  ~Mixtral();

  const MixtralConfig& config() const;

  // Forward and backward of one micro-batch: gradients of the global mean loss go to the store; sums are
  // added to `sums`. The loss is Σ w·nll / Σ w, plus router_aux_loss_coef · aux where
  // config.output_router_logits is set; micro-batches weigh in the auxiliary loss by their tokens.
  void TrainMicroBatch(const data::Batch& batch, const LossScale& scale, LossSums& sums);

  // Forward only: nll of every label, [T] in the compute type (0 where ignored).
  Tensor Evaluate(const data::Batch& batch, LossSums* sums = nullptr);

  // Forward only, whole logits [T, V] and router logits [T, E] of each layer, for verification.
  struct Logits {
    Tensor logits;
    std::vector<Tensor> router_logits;
    std::vector<Tensor> experts;  // i32 [T, K] a layer
  };
  Logits ComputeLogits(const data::Batch& batch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cistron::model
