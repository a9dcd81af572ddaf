#include "cistron/train/reference_errors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::train {
namespace {

// Row r of a matrix in f64.
std::vector<double> Row(const Tensor& t, std::int64_t r) {
  std::vector<double> row(static_cast<std::size_t>(t.dim(1)));
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = ElementAsDouble(t, r * t.dim(1) + static_cast<std::int64_t>(i));
  }
  return row;
}

double LogSumExp(const std::vector<double>& x) {
  const double largest = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - largest);
  return largest + std::log(sum);
}

double LossError(const Tensor& a, const Tensor& b, const data::Batch& batch) {
  double sum = 0, labels = 0;
  for (std::int64_t t = 0; t < batch.num_tokens(); ++t) {
    const std::int64_t label = batch.labels.data<std::int64_t>()[t];
    if (label == ops::kIgnoreLabel) continue;
    const auto nll = [&](const Tensor& logits) {
      const std::vector<double> row = Row(logits, t);
      return LogSumExp(row) - row[static_cast<std::size_t>(label)];
    };
    sum += std::abs(nll(a) - nll(b));
    labels += 1;
  }
  return sum / labels;
}

std::vector<double> Chosen(const Tensor& experts, std::int64_t token, std::size_t num_experts) {
  std::vector<double> chosen(num_experts, 0.0);
  for (const double e : Row(experts, token)) chosen[static_cast<std::size_t>(e)] += 1;
  return chosen;
}

// Of all layers, whose tokens count together.
double AuxLossError(const model::Mixtral::Logits& got, const model::Mixtral::Logits& exact) {
  const auto num_experts = static_cast<std::size_t>(exact.router_logits.at(0).dim(1));
  std::vector<double> assigned(num_experts), probability(num_experts), chosen_error(num_experts),
      probability_error(num_experts);
  double tokens = 0;
  for (std::size_t layer = 0; layer < exact.router_logits.size(); ++layer) {
    for (std::int64_t t = 0; t < exact.router_logits[layer].dim(0); ++t, tokens += 1) {
      const auto a = Row(got.router_logits[layer], t), b = Row(exact.router_logits[layer], t);
      const double lse_a = LogSumExp(a), lse_b = LogSumExp(b);
      const auto chosen_a = Chosen(got.experts[layer], t, num_experts);
      const auto chosen_b = Chosen(exact.experts[layer], t, num_experts);
      for (std::size_t e = 0; e < num_experts; ++e) {
        const double p = std::exp(b[e] - lse_b);
        probability[e] += p;
        probability_error[e] += std::abs(std::exp(a[e] - lse_a) - p);
        assigned[e] += chosen_a[e];
        chosen_error[e] += std::abs(chosen_a[e] - chosen_b[e]);
      }
    }
  }
  double sum = 0;
  for (std::size_t e = 0; e < num_experts; ++e) {
    sum += chosen_error[e] * probability[e] + assigned[e] * probability_error[e];
  }
  return static_cast<double>(num_experts) * sum / (tokens * tokens);
}

double GradientError(GoldenReplay& got, GoldenReplay& exact) {
  double squares = 0;
  for (std::size_t i = 0; i < exact.parameters().size(); ++i) {
    const Tensor &a = got.parameters()[i].grad, &b = exact.parameters()[i].grad;
    for (std::int64_t j = 0; j < b.numel(); ++j) {
      const double d = ElementAsDouble(a, j) - ElementAsDouble(b, j);
      squares += d * d;
    }
  }
  return std::sqrt(squares);
}

}  // namespace

std::int64_t CountRerouted(const Tensor& experts, const Tensor& others) {
  std::int64_t count = 0;
  for (std::int64_t t = 0; t < experts.dim(0); ++t) {
    const std::vector<double> theirs = Row(others, t);
    for (const double e : Row(experts, t)) {
      count += std::find(theirs.begin(), theirs.end(), e) == theirs.end() ? 1 : 0;
    }
  }
  return count;
}

double LargestGap(const Tensor& logits, const Tensor& experts) {
  double largest = 0;
  for (std::int64_t t = 0; t < logits.dim(0); ++t) {
    const std::vector<double> row = Row(logits, t);
    const std::vector<double> chosen = Chosen(experts, t, row.size());
    double lowest_chosen = std::numeric_limits<double>::infinity(), highest_left = -lowest_chosen;
    for (std::size_t e = 0; e < row.size(); ++e) {
      if (chosen[e] > 0) {
        lowest_chosen = std::min(lowest_chosen, row[e]);
      } else {
        highest_left = std::max(highest_left, row[e]);
      }
    }
    const double gap = highest_left - lowest_chosen;
    // Not a number, too, is no choice to accept.
    if (!(gap <= largest)) largest = gap;
  }
  return largest;
}

// Errors of router logits, and how far choices go against them.
void ReferenceErrors::CompareChoices(const model::Mixtral::Logits& got, std::int64_t step,
                                     StepErrors& errors) {
  const Choices& choices = choices_[static_cast<std::size_t>(step)];
  same_choices_.TakeExperts(choices);
  const model::Mixtral::Logits exact = same_choices_.ComputeLogits(step);
  for (std::size_t layer = 0; layer < choices.size(); ++layer) {
    const Tensor &a = got.router_logits[layer], &b = exact.router_logits[layer];
    double error = 0;
    for (std::int64_t i = 0; i < b.numel(); ++i) {
      error = std::max(error, std::abs(ElementAsDouble(a, i) - ElementAsDouble(b, i)));
    }
    const double gap = LargestGap(b, choices[layer]), bound = 4 * error;
    if (layer == 0 || !(gap * errors.gap_bound <= errors.gap * bound)) {
      errors.gap = gap;
      errors.gap_bound = bound;
    }
  }
}

void ReferenceErrors::BeforePass(GoldenReplay& got, std::int64_t step) {
  const model::MixtralConfig& config = folder_.hf.config;
  const double coefficient = config.output_router_logits ? config.router_aux_loss_coef : 0;
  const model::Mixtral::Logits a = got.ComputeLogits(step), b = exact_.ComputeLogits(step);
  StepErrors& e = steps_.emplace_back();
  for (std::size_t layer = 0; layer < a.experts.size(); ++layer) {
    e.rerouted += CountRerouted(a.experts[layer], b.experts[layer]);
  }
  CompareChoices(a, step, e);
  e.aux_loss = AuxLossError(a, b);
  e.loss = LossError(a.logits, b.logits, folder_.MakeBatch(step)) + coefficient * e.aux_loss;
  exact_.ForwardBackward(step);
  same_choices_.ForwardBackward(step);
}

void ReferenceErrors::BeforeUpdate(GoldenReplay& got) {
  steps_.back().grad_norm = GradientError(got, exact_);
  for (GoldenReplay* run : {&exact_, &same_choices_}) {
    run->ComputeGradNorm();
    run->Update();
  }
}

}  // namespace cistron::train
