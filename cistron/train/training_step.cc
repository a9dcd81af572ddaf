#include "cistron/train/training_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/ops/reduce/reduce.h"
#include "cistron/quant/autocast.h"
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

// Other ranks may be looking elsewhere: where there are any, nothing may wait for them.
bool AloneOnMesh(const model::LocalMixtral& m) {
  return m.mesh == nullptr || m.mesh->size() == 1;
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
                         AloneOnMesh(m) ? FirstToken(m, micro_batches, layer) : std::string());
    }
  }
  if (!std::isfinite(sums.weighted_nll.item()))
    return "the logits of the head, after the last layer";
  // Backward runs from the last layer to the first.
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    if (p->grad && HasNonFinite(p->grad)) {
      return fmt::format("the gradient of {}", Place(p->spec.name));
    }
  }
  return "the sum of squares of the gradients, which overflows";
}

// Where the parts of StepSums::block begin, in elements of 8 bytes.
struct SumLayout {
  std::int64_t layers, experts;

  explicit SumLayout(const model::MixtralConfig& c)
      : layers(c.num_hidden_layers), experts(c.num_local_experts) {}
  std::int64_t layer_aux() const { return 2; }
  std::int64_t z() const { return 2 + layers; }
  std::int64_t overflow() const { return 2 + 2 * layers; }
  std::int64_t norm() const { return overflow() + 1; }
  std::int64_t values() const { return norm() + 1; }
  std::int64_t counts() const { return values(); }
  std::int64_t nonfinite() const { return counts() + layers * experts; }
  std::int64_t needed() const { return nonfinite() + layers; }
  std::int64_t size() const { return needed() + 1; }
};

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

StepSums::StepSums(const ops::Context& ctx, const model::MixtralConfig& config) {
  const SumLayout at(config);
  block = ctx.Empty({at.size()}, DType::kF64);
  values = block.Slice(0, 0, at.values());
  const auto integers = [&](std::int64_t begin, const Shape& shape) {
    return Tensor::Borrow(block.data<double>() + begin, shape, DType::kI64, block.device());
  };
  sums = {.weighted_nll = block.Select(0),
          .aux_loss = block.Select(1),
          .expert_counts = integers(at.counts(), {at.layers, at.experts}),
          .nonfinite_tokens = integers(at.nonfinite(), {at.layers}),
          .layer_aux_loss = block.Slice(0, at.layer_aux(), at.layers),
          .z_loss = block.Slice(0, at.z(), at.layers),
          .overflow = block.Select(at.overflow())};
  rows_needed = integers(at.needed(), {});
}

void QueueStep(const ops::Context& ctx, model::LocalMixtral& m, optim::AdamWOptimizer& optimizer,
               std::span<const data::Batch> micro_batches, const StepScalars& scalars,
               std::uint64_t seed, const Tensor& gate, const StepSums& step) {
  FillZero(step.block);
  model::LossSums sums = step.sums;
  const model::LossScale scale{scalars.inv_weight_sum, scalars.inv_tokens};
  m.store.ExpectMicroBatches(static_cast<std::int64_t>(micro_batches.size()));
  parallel::PeerDispatcher* peers = m.expert_ranks != nullptr ? m.expert_ranks->peers() : nullptr;
  // State of delayed scaling would advance twice in a step that is made again.
  const quant::Autocast* scope = quant::Autocast::Current();
  CISTRON_CHECK(peers == nullptr || scope == nullptr || !quant::Quantizes(scope->recipe()),
                "training step: {} needs ranks whose hosts count rows (ExpertExchange)",
                quant::Name(scope->recipe()));
  if (peers != nullptr) peers->Reset();
  {
    const parallel::ExpertParallelDispatcher::Step dispatches(peers != nullptr ? m.expert_ranks
                                                                               : nullptr);
    for (const data::Batch& batch : micro_batches) {
      m.model.TrainMicroBatch(batch, scale, sums, {seed, scalars.step_index});
    }
  }
  if (peers != nullptr) {
    CopyTo(peers->status(), sums.overflow);
    CopyTo(peers->needed(), step.rows_needed);
  }
  // Summed by ranks of a group without peers too: others may have them. No rank on a CPU has.
  if (m.expert_ranks == nullptr || ctx.device().type == DeviceType::kCpu) sums.overflow = {};
  m.SumOverRanks(sums);
  const TraceRange range("optimizer");
  optimizer.QueueGradNorm();
  CopyTo(optimizer.norm(), step.values.Select(step.values.numel() - 1));
  ops::GateUpdate(ctx, step.values, gate, optimizer.clip());
  optimizer.QueueUpdate(scalars.lr, scalars.step);
  m.model.UpdateExpertBias(sums, gate);
}

StepResult ReadStep(const Tensor& block, const model::MixtralConfig& config,
                    const data::BatchTotals& totals, bool& finite) {
  const SumLayout at(config);
  const auto values = block.span<double>();
  const auto part = [&](std::int64_t begin) {
    const auto v =
        values.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(at.layers));
    return std::vector<double>(v.begin(), v.end());
  };
  StepResult result;
  result.loss = totals.weight_sum > 0 ? values[0] / totals.weight_sum : 0.0 * values[0];
  result.aux_loss = values[1];
  if (config.moe_aux_loss_coeff > 0) result.layer_aux_loss = part(at.layer_aux());
  if (config.moe_z_loss_coeff > 0) result.z_loss = part(at.z());
  result.grad_norm = values[static_cast<std::size_t>(at.norm())];
  finite = AllFinite<double>(values.subspan(0, static_cast<std::size_t>(at.values())));
  const auto integers = [&](std::int64_t begin, const Shape& shape) {
    return Tensor::Borrow(block.data<double>() + begin, shape, DType::kI64);
  };
  const Tensor counts = integers(at.counts(), {at.layers, at.experts});
  for (std::int64_t i = 0; i < at.layers; ++i) {
    const auto row = counts.Select(i).span<std::int64_t>();
    result.expert_counts.emplace_back(row.begin(), row.end());
  }
  const Tensor nonfinite = integers(at.nonfinite(), {at.layers});
  const auto tokens = nonfinite.span<std::int64_t>();
  // Rows that did not fit come back as zeros, which make nothing of the forward pass infinite.
  const bool diverged = !std::isfinite(values[0]) ||
                        std::any_of(tokens.begin(), tokens.end(), [](auto n) { return n > 0; });
  const double status = values[static_cast<std::size_t>(at.overflow())];
  const bool in_vain = std::isnan(status);
  result.overflow = in_vain || (std::isinf(status) && !diverged);
  const std::int64_t needed = *integers(at.needed(), {}).data<std::int64_t>();
  result.rows_needed = in_vain ? std::min<std::int64_t>(needed, -1) : needed;
  return result;
}

std::int64_t ExchangeMemory(const model::LocalMixtral& m) {
  if (m.expert_ranks == nullptr || m.expert_ranks->peers() == nullptr) return 0;
  const AllocatorStats stats = m.expert_ranks->peers()->Stats();
  return stats.live_bytes + stats.cached_bytes;
}

void WarnOfNoWeight(std::int64_t step, const data::BatchTotals& totals) {
  if (totals.weight_sum > 0) return;
  LogWarning(
      "step {}: no label of the global batch has weight, its loss of 0 means nothing: all its "
      "bases are degenerate, in tags, or lower case with data.soft_mask_weight=0; a larger "
      "batch.global_tokens makes this rarer",
      step);
}

void PrepareAgain(model::LocalMixtral& m, std::int64_t step, const StepResult& result) {
  m.store.ZeroGradients();
  CISTRON_INVARIANT(result.rows_needed >= -1, "step {}: ranks gave different buffers", step);
  parallel::PeerDispatcher* peers = m.expert_ranks != nullptr ? m.expert_ranks->peers() : nullptr;
  if (result.rows_needed == -1) {
    const std::string whom = peers != nullptr ? peers->WaitsFor() : std::string();
    CISTRON_THROW(kIo, "step {}: rows of experts: {}", step,
                  whom.empty() ? "a rank waited in vain for another"
                               : fmt::format("rank {} {}, in vain", m.mesh->rank(), whom));
  }
  // The same buffers in every group, so that one number of a checkpoint brings them back.
  const Tensor most = Tensor::Zeros({1}, DType::kI64);
  most.span<std::int64_t>()[0] = result.rows_needed;
  m.mesh->world().AllReduce(most, comm::ReduceOp::kMax);
  const std::int64_t needed = most.span<std::int64_t>()[0];
  if (m.expert_ranks == nullptr) return;
  if (peers != nullptr) peers->Grow(needed);
  // A group whose hosts count has no buffers, but may be the one that writes the checkpoint.
  const Tensor largest = Tensor::Zeros({1}, DType::kF64);
  largest.span<double>()[0] = m.expert_ranks->buffer_factor();
  m.mesh->world().AllReduce(largest, comm::ReduceOp::kMax);
  const double factor = largest.span<double>()[0];
  m.expert_ranks->RaiseBufferFactor(factor);
  if (!m.mesh->is_first()) return;
  LogWarning(
      "step {}: {} rows were routed to the experts of one rank, more than its buffer has; buffers "
      "have {:.3g} times an even share now and the step is made again. Where this comes often, a "
      "larger parallel.ep_buffer_factor or a larger auxiliary loss helps",
      step, needed, factor);
}

StepResult TrainStep(const ops::Context& ctx, model::LocalMixtral& m,
                     optim::AdamWOptimizer& optimizer, std::span<const data::Batch> micro_batches,
                     const data::BatchTotals& totals, double lr, std::uint64_t seed) {
  const std::int64_t step = optimizer.step() + 1;
  WarnOfNoWeight(step, totals);
  const Tensor scalars = Tensor::Empty({StepScalars::kBytes}, DType::kU8);
  StepScalars::Set(scalars, lr, step, totals);
  const Tensor placed = ctx.Place(scalars);
  const StepSums sums(ctx, m.model.config());
  const Tensor gate = ctx.Zeros({}, DType::kF64);
  bool finite = true;
  StepResult result;
  for (int redone = 0;; ++redone) {
    QueueStep(ctx, m, optimizer, micro_batches, StepScalars::In(placed), seed, gate, sums);
    result = ReadStep(sums.block.ToHost(), m.model.config(), totals, finite);
    result.redone = redone;
    if (!result.overflow) break;
    optimizer.set_step(step - 1);
    PrepareAgain(m, step, result);
    FillZero(gate);
  }
  if (!finite) {
    optimizer.set_step(step - 1);
    CISTRON_THROW(kNumericalFailure,
                  "step {}: the loss is {} and the gradient norm {}; the first value that is not "
                  "finite is in {}",
                  step, result.loss, result.grad_norm, FirstNonFinite(m, micro_batches, sums.sums));
  }
  return result;
}

}  // namespace cistron::train
