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
#pragma once

#include <vector>

#include "cistron/train/golden_replay.h"

namespace cistron::train {

// Absolute errors of one step, without cancelling.
struct StepErrors {
  double loss = 0;  // with the auxiliary term
  double aux_loss = 0;
  double grad_norm = 0;
  // The reference's experts of every token [T, K], by layer, and how many of its choices the f64
  // run does not make.
  std::vector<Tensor> experts;
  std::int64_t rerouted = 0;
};

// Experts of a token that only one of two routings of a layer chooses, summed over tokens.
std::int64_t CountRerouted(const Tensor& experts, const Tensor& others);

// Takes the errors of a reference that makes its steps, beside a run in f64.
class ReferenceErrors {
 public:
  // `ctx` gives memory, the implementation is `ref`.
  ReferenceErrors(const ops::Context& ctx, const GoldenFolder& folder)
      : folder_(folder), exact_(ctx.WithImpl("ref"), folder, {DType::kF64}) {}

  // Before `got` runs a step forward and backward, and between that and its update.
  void BeforePass(GoldenReplay& got, std::int64_t step);
  void BeforeUpdate(GoldenReplay& got);

  const std::vector<StepErrors>& steps() const { return steps_; }

 private:
  const GoldenFolder& folder_;
  GoldenReplay exact_;
  std::vector<StepErrors> steps_;
};

}  // namespace cistron::train
