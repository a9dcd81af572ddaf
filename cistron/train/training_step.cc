#include "cistron/train/training_step.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/tensor/trace.h"

namespace cistron::train {
namespace {

// Without a branch an element: it runs over all weights at every checkpoint.
template <class T>
bool AllFinite(std::span<const T> values) {
  bool finite = true;
  for (const T x : values) finite &= std::isfinite(x);
  return finite;
}

bool HasNonFinite(const Tensor& tensor) {
  const Tensor t = tensor.ToHost();
  if (t.dtype() == DType::kF32) return !AllFinite<float>(t.span<float>());
  if (t.dtype() == DType::kF64) return !AllFinite<double>(t.span<double>());
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    if (!std::isfinite(ElementAsDouble(t, i))) return true;
  }
  return false;
}

std::string Place(const std::string& parameter_name) {
  const std::int64_t layer = LayerOf(parameter_name);
  return layer < 0 ? parameter_name : fmt::format("layer {} ({})", layer, parameter_name);
}

// ", the first at position 7 of the global batch": the forward pass runs once more to find it.
// Empty where it does not come again, as with jitter.
std::string FirstToken(model::LocalMixtral& m, std::span<const data::Batch> micro_batches,
                       std::size_t layer) {
  std::int64_t before = 0;
  for (const data::Batch& batch : micro_batches) {
    const model::Mixtral::Logits found = m.model.ComputeLogits(batch);
    const Tensor& logits = found.router_logits[layer];
    for (std::int64_t t = 0; t < logits.dim(0); ++t) {
      if (batch.token_mask && batch.token_mask.data<std::uint8_t>()[t] == 0) continue;
      if (HasNonFinite(logits.Select(t))) {
        return fmt::format(", the first at position {} of the global batch", before + t);
      }
    }
    before += batch.num_tokens();
  }
  return {};
}

// Where values stop being finite, looked for in the order of cause: a weight, the forward pass, the
// backward pass.
std::string FirstNonFinite(model::LocalMixtral& m, std::span<const data::Batch> micro_batches,
                           const model::LossSums& sums) {
  const auto& parameters = m.store.parameters();
  for (const auto& p : parameters) {
    if (HasNonFinite(p.master)) return fmt::format("a weight of {}", Place(p.spec.name));
  }
  const Tensor nonfinite = sums.nonfinite_tokens.ToHost();
  const auto tokens = nonfinite.span<std::int64_t>();
  for (std::size_t layer = 0; layer < tokens.size(); ++layer) {
    if (tokens[layer] > 0) {
      return fmt::format("the router logits of layer {} ({} tokens{})", layer, tokens[layer],
                         FirstToken(m, micro_batches, layer));
    }
  }
  if (!std::isfinite(sums.weighted_nll.item()))
    return "the logits of the head, after the last layer";
  // Backward runs from the last layer to the first.
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    if (p->has_grad && HasNonFinite(p->grad)) {
      return fmt::format("the gradient of {}", Place(p->spec.name));
    }
  }
  return "the sum of squares of the gradients, which overflows";
}

std::vector<std::vector<std::int64_t>> Rows(const Tensor& tensor) {
  const Tensor counts = tensor.ToHost();
  std::vector<std::vector<std::int64_t>> rows;
  for (std::int64_t i = 0; i < counts.dim(0); ++i) {
    const auto row = counts.Select(i).span<std::int64_t>();
    rows.emplace_back(row.begin(), row.end());
  }
  return rows;
}

std::vector<double> Values(const Tensor& tensor) {
  const Tensor t = tensor.ToHost();
  const auto values = t.span<double>();
  return {values.begin(), values.end()};
}

double InverseOrZero(double x) {
  return x > 0 ? 1.0 / x : 0.0;
}

}  // namespace

std::int64_t LayerOf(const std::string& name) {
  static constexpr std::string_view kPrefix = "model.layers.";
  if (name.compare(0, kPrefix.size(), kPrefix) != 0) return -1;
  std::int64_t layer = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer;
}

void CheckFiniteWeights(const nn::LocalParameterStore& store, std::int64_t step) {
  for (const auto& p : store.parameters()) {
    if (!HasNonFinite(p.master)) continue;
    CISTRON_THROW(kNumericalFailure,
                  "step {}: after the update a weight of {} is not finite; these weights are not "
                  "saved, and the last good checkpoint stays",
                  step, Place(p.spec.name));
  }
}

StepResult TrainStep(const ops::Context& ctx, model::LocalMixtral& m,
                     optim::AdamWOptimizer& optimizer, std::span<const data::Batch> micro_batches,
                     const data::BatchTotals& totals, double lr, std::uint64_t seed) {
  const model::MixtralConfig& config = m.model.config();
  const model::LossScale scale{
      ctx.Place(Tensor::Scalar(InverseOrZero(totals.weight_sum))),
      ctx.Place(Tensor::Scalar(InverseOrZero(static_cast<double>(totals.tokens))))};
  if (totals.weight_sum <= 0) {
    LogWarning(
        "step {}: no label of the global batch has weight, its loss of 0 means nothing: all its "
        "bases are degenerate, in tags, or lower case with data.soft_mask_weight=0; a larger "
        "batch.global_tokens makes this rarer",
        optimizer.step() + 1);
  }
  model::LossSums sums = model::LossSums::Zeros(ctx, config);
  const model::StepNoise noise{
      seed, ctx.Place(Tensor::FromSpan<std::int64_t>({}, std::array{optimizer.step() + 1}))};
  for (const data::Batch& batch : micro_batches) {
    m.model.TrainMicroBatch(batch, scale, sums, noise);
  }
  StepResult result;
  result.loss = sums.weighted_nll.item() * InverseOrZero(totals.weight_sum);
  result.aux_loss = sums.aux_loss.item();
  if (config.moe_aux_loss_coeff > 0) result.layer_aux_loss = Values(sums.layer_aux_loss);
  if (config.moe_z_loss_coeff > 0) result.z_loss = Values(sums.z_loss);
  result.grad_norm = optimizer.ComputeGradNorm();
  if (!std::isfinite(result.loss) || !std::isfinite(result.aux_loss) ||
      !std::isfinite(result.grad_norm) || !AllFinite<double>(result.layer_aux_loss) ||
      !AllFinite<double>(result.z_loss)) {
    const std::string place = FirstNonFinite(m, micro_batches, sums);
    m.store.ZeroGradients();
    CISTRON_THROW(kNumericalFailure,
                  "step {}: the loss is {} and the gradient norm {}; the first value that is not "
                  "finite is in {}",
                  optimizer.step() + 1, result.loss, result.grad_norm, place);
  }
  result.expert_counts = Rows(sums.expert_counts);
  const TraceRange range("optimizer");
  optimizer.Update(lr);
  m.model.UpdateExpertBias(sums);
  return result;
}

}  // namespace cistron::train
