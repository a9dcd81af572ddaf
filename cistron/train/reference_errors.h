// What a low precision (bf16, a recipe) does to the numbers of a golden folder, measured on the
// scalar reference. Internal to verify.
//
// A loss or a norm is one number in which errors of either sign cancel, by luck to almost nothing:
// the reference's own error of it is no measure of what another implementation may do. What does
// not depend on luck is how much there is to cancel. Beside the reference in that precision goes
// one in f64, over the same steps, and with δ the difference of both:
//   loss          |δ mean_t nll_t| ≤ mean_t |δ nll_t|, plus the coefficient times that of aux_loss;
//   aux_loss      E Σ_e f_e P_e, f_e the assignments of e and P_e the probability of e, both a
//                 token: ≤ E Σ_e (mean_t |δ chosen_te| · P_e + f_e · mean_t |δ p_te|);
//   grad_norm     |δ ‖g‖| ≤ ‖δ g‖, over all parameters.
//
// An implementation that rounds otherwise may choose another expert for a token whose logits are
// nearly equal, and err by a whole expert there. So the reference makes the choices that the
// implementation made, and errs with it; and a second run in f64 that makes them too tells whether
// they may be: with ε the largest error of the reference's router logits beside that run's, at one
// layer and step, the implementation's own are allowed 2ε, so a chosen expert may lie below one
// that is left by 4ε in f64, twice what one logit is allowed.
#pragma once

#include <vector>

#include "cistron/train/golden_replay.h"

namespace cistron::train {

// Absolute errors of one step, without cancelling.
struct StepErrors {
  double loss = 0;  // with the auxiliary term
  double aux_loss = 0;
  double grad_norm = 0;
  // By how much the worst choice, of its bound, is below one that is left; of all choices, those
  // that the f64 run which chooses for itself does not make.
  double gap = 0, gap_bound = 0;
  std::int64_t rerouted = 0;
};

// Experts of a step, [T, K] a layer.
using Choices = std::vector<Tensor>;

// The largest difference, over tokens, between the highest logit of an expert that is not chosen
// and the lowest of one that is; 0 where no choice is below. logits [T, E], experts [T, K].
double LargestGap(const Tensor& logits, const Tensor& experts);

// Experts of a token that only one of two routings of a layer chooses, summed over tokens.
std::int64_t CountRerouted(const Tensor& experts, const Tensor& others);

// Takes the errors of a reference that makes its steps, beside a run in f64.
class ReferenceErrors {
 public:
  // `ctx` gives memory, the implementation is `ref`. `choices` of every step outlive this.
  ReferenceErrors(const ops::Context& ctx, const GoldenFolder& folder,
                  const std::vector<Choices>& choices)
      : folder_(folder),
        choices_(choices),
        exact_(ctx.WithImpl("ref"), folder, {DType::kF64}),
        same_choices_(ctx.WithImpl("ref"), folder, {DType::kF64}) {}

  // Before `got`, which makes the choices, runs a step forward and backward, and between that and
  // its update.
  void BeforePass(GoldenReplay& got, std::int64_t step);
  void BeforeUpdate(GoldenReplay& got);

  const std::vector<StepErrors>& steps() const { return steps_; }

 private:
  void CompareChoices(const model::Mixtral::Logits& got, std::int64_t step, StepErrors& errors);

  const GoldenFolder& folder_;
  const std::vector<Choices>& choices_;
  GoldenReplay exact_, same_choices_;  // in f64
  std::vector<StepErrors> steps_;
};

}  // namespace cistron::train
