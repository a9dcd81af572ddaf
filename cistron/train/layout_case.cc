#include "cistron/train/layout_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <type_traits>

#include "cistron/base/philox.h"
#include "cistron/comm/inproc.h"
#include "cistron/parallel/agreement.h"
#include "cistron/parallel/mesh.h"
#include "cistron/parallel/rank_sums.h"
#include "cistron/quant/autocast.h"
#include "cistron/train/step_inputs.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

constexpr std::uint64_t kSeed = 20261130;

Tensor Scalar(double value) {
  return Tensor::FromSpan<double>({1}, std::array{value});
}

// A row of two sequences, of uneven weights that have few bits; every fourth row weighs nothing, so
// that ranks weigh differently.
data::Batch MakeRow(std::int64_t step, std::int64_t row, const LayoutCase& c) {
  const RandomStream stream(kSeed, "layout_case");
  const std::uint64_t first = static_cast<std::uint64_t>((step * c.rows + row) * kRowTokens);
  const bool weighs = c.weights_of_first ? row < c.rows / 2 : row % 4 != 3;
  data::Batch b;
  b.sequences = ops::PackedFromLengths(std::array<std::int64_t, 2>{4, kRowTokens - 4});
  b.tokens = Tensor::Empty({kRowTokens}, DType::kI64);
  b.labels = Tensor::Empty({kRowTokens}, DType::kI64);
  b.weights = Tensor::Zeros({kRowTokens}, DType::kF32);
  const auto tokens = b.tokens.span<std::int64_t>(), labels = b.labels.span<std::int64_t>();
  const auto weights = b.weights.span<float>();
  for (std::size_t t = 0; t < kRowTokens; ++t) {
    const std::uint64_t at = first + t;
    tokens[t] = static_cast<std::int64_t>(
        stream.Below(at, static_cast<std::uint64_t>(c.config.vocab_size)));
    labels[t] = -100;
    if (t == 0 || t == 4) continue;
    labels[t - 1] = tokens[t];
    weights[t - 1] = weighs ? 0.25f * static_cast<float>(1 + stream.Below(at + (1u << 30), 8)) : 0;
  }
  return b;
}

data::GlobalBatch MakeGlobalBatch(std::int64_t step, const LayoutCase& c) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(c.rows));
  std::iota(order.begin(), order.end(), 0);
  if (c.row_order != 0) {
    const RandomStream stream(c.row_order, "row_order");
    for (std::uint64_t i = order.size() - 1; i > 0; --i) {
      std::swap(order[i], order[stream.Below(static_cast<std::uint64_t>(step) * 1000 + i, i + 1)]);
    }
  }
  data::GlobalBatch batch;
  batch.seq_len = kRowTokens;
  for (const std::int64_t row : order) {
    batch.rows.push_back(MakeRow(step, row, c));
    for (const float w : batch.rows.back().weights.span<float>()) batch.totals.weight_sum += w;
  }
  batch.totals.tokens = c.rows * kRowTokens;
  batch.totals.rows = c.rows;
  return batch;
}

// Masked tokens behind those of a micro-batch.
data::Batch Pad(const data::Batch& b, std::int64_t padding) {
  if (padding == 0) return b;
  const std::int64_t used = b.num_tokens(), tokens = used + padding;
  data::Batch padded = b;
  const auto grow = [&](Tensor& t, double fill) {
    const Tensor larger = Tensor::Empty({tokens}, t.dtype());
    for (std::int64_t i = used; i < tokens; ++i) {
      if (t.dtype() == DType::kF32)
        larger.data<float>()[i] = static_cast<float>(fill);
      else
        larger.data<std::int64_t>()[i] = static_cast<std::int64_t>(fill);
    }
    std::memcpy(larger.raw(), t.raw(), static_cast<std::size_t>(t.bytes()));
    t = larger;
  };
  grow(padded.tokens, 0);
  grow(padded.labels, -100);
  grow(padded.weights, 0);
  grow(padded.sequences.positions, 0);
  padded.sequences.uniform = false;
  padded.token_mask = Tensor::Zeros({tokens}, DType::kU8);
  std::fill_n(padded.token_mask.data<std::uint8_t>(), used, std::uint8_t{1});
  return padded;
}

// Signs that no two elements, tensors, steps or seeds share.
class Signs {
 public:
  Signs(std::uint64_t seed, const std::string& name, std::int64_t step)
      : stream_(seed, name), offset_(static_cast<std::uint64_t>(step) << 32) {}
  double operator()(std::int64_t i) const {
    return stream_.Below(offset_ + static_cast<std::uint64_t>(i), 2) == 0 ? 1 : -1;
  }

 private:
  RandomStream stream_;
  std::uint64_t offset_;
};

void PerturbLabelWeights(const LayoutCase& c, std::int64_t step, data::GlobalBatch& batch) {
  if (c.perturb_label_weights == 0) return;
  const Signs sign(c.perturb_seed, "label_weights", step);
  std::int64_t at = 0;
  for (data::Batch& row : batch.rows) {
    for (float& w : row.weights.span<float>()) {
      w *= static_cast<float>(1 + c.perturb_label_weights * sign(at++));
    }
  }
}

// Puts this rank's box into the global tensor; ranks that hold the same values must agree on them.
void Collect(std::map<std::string, Tensor>& all, std::map<std::string, Tensor>& seen,
             const std::string& name, const Tensor& box, const Shape& global, const Shape& start,
             int rank, std::vector<std::string>& differences) {
  Tensor& whole = all[name];
  Tensor& filled = seen[name];
  if (!whole) {
    whole = Tensor::Zeros(global, box.dtype());
    filled = Tensor::Zeros(global, DType::kU8);
  }
  const std::size_t size = SizeOf(box.dtype());
  bool differs = false;
  for (std::int64_t i = 0; i < box.numel(); ++i) {
    std::int64_t at = 0, rest = i, stride = 1;
    for (int d = global.rank() - 1; d >= 0; --d) {
      at += (start[d] + rest % box.dim(d)) * stride;
      rest /= box.dim(d);
      stride *= global[d];
    }
    auto* const to = static_cast<char*>(whole.raw()) + static_cast<std::size_t>(at) * size;
    const auto* const from =
        static_cast<const char*>(box.raw()) + static_cast<std::size_t>(i) * size;
    std::uint8_t& there = filled.data<std::uint8_t>()[at];
    differs = differs || (there != 0 && std::memcmp(to, from, size) != 0);
    std::memcpy(to, from, size);
    there = 1;
  }
  if (differs) differences.push_back(fmt::format("rank {} has other bits of {}", rank, name));
}

Shape Origin(Shape shape) {
  for (int i = 0; i < shape.rank(); ++i) shape[i] = 0;
  return shape;
}

// The run of one rank, and what it adds to that of all.
class Rank {
 public:
  Rank(const LayoutCase& c, const Layout& layout, comm::Communicator& world)
      : c_(c),
        layout_(layout),
        mesh_(world, layout.dp, layout.ep, c.config.num_local_experts),
        m_(ctx_, c.config, c.dtype, true, &mesh_,
           {.sharded = layout.sharded, .quantized_rows = c.quantized_rows}),
        optimizer_(ctx_, m_.store, {.adamw = {.eps = 0.02}}, m_.statistics.get()) {
    m_.model.SetRecompute(c.recompute);
    if (c.narrow_gradients) m_.store.SetGradientDType(c.dtype);
    m_.store.Initialize(kSeed, c.config.initializer_range);
    for (const auto& p : m_.store.parameters()) SetInitialWeight(p.spec);
    m_.store.MarkChanged();
    if (!c.restore_from.empty()) RestoreTrainingState(c.restore_from, m_, optimizer_, scaling_);
  }

  void Train(LayoutRun& run, std::mutex& mutex, std::map<std::string, Tensor>& seen) {
    const std::int64_t first = optimizer_.step() + 1;
    for (std::int64_t step = first; step <= c_.steps; ++step) {
      data::GlobalBatch batch = MakeGlobalBatch(step, c_);
      PerturbLabelWeights(c_, step, batch);
      const std::vector<Tensor> exact = PerturbModelWeights(step);
      if (layout_.ranks() == 1) RecordScores(batch, run);
      const StepResult result = Step(batch, step, exact);
      const std::lock_guard lock(mutex);
      if (mesh_.is_first()) run.steps.push_back(result);
      run.norms[{step, mesh_.rank()}] = result.grad_norm;
      if (c_.drift && mesh_.rank() == 1) Drift();
      if (step > first) continue;
      for (const auto& p : m_.store.parameters()) {
        for (const auto& box : nn::LocalParameterStore::BoxesOf(p, p.grad)) {
          Collect(run.gradients, seen, p.spec.name, box.values, p.spec.shape, box.start,
                  mesh_.rank(), run.differences);
        }
      }
    }
    if (c_.die_in_save && mesh_.rank() == 1) {
      parallel::FromFirst(mesh_.world(), [] { return std::string(); });  // the first rank's folder
      CISTRON_THROW(kInternal, "rank 1 dies");
    }
    if (!c_.save_to.empty()) {
      WriteSnapshot(c_.save_to, TakeSnapshot(m_, optimizer_, scaling_, {}, RunConfig()),
                    m_.mesh->world());
    }
    const double heldout = HeldoutLoss();
    const std::lock_guard lock(mutex);
    for (const auto& s : optimizer_.State()) {
      Collect(run.state, seen, s.name, s.tensor, s.global_shape, s.start, mesh_.rank(),
              run.differences);
    }
    for (const auto& b : m_.store.buffers()) {
      Collect(run.state, seen, b.name, b.value, b.value.shape(), Origin(b.value.shape()),
              mesh_.rank(), run.differences);
    }
    for (const auto& [name, tensor] : scaling_.Tensors()) {
      const bool experts = name.find(".mlp.experts.") != std::string::npos;
      Shape global = tensor.shape(), start = Origin(global);
      const int groups = global.rank() - 1;
      if (experts) start[groups] = mesh_.ep_index() * global[groups];
      if (experts) global[groups] *= mesh_.ep();
      Collect(run.state, seen, "quant/" + name, tensor, global, start, mesh_.rank(),
              run.differences);
    }
    if (mesh_.is_first()) run.heldout = heldout;
  }

 private:
  // Embeddings hold a code that the routers read, four numbers in an order of the token's own, half
  // apart at least; what layers add to an embedding is small beside it.
  void SetInitialWeight(const nn::ParameterSpec& spec) {
    const bool code = spec.name == "model.embed_tokens.weight";
    const bool gate = spec.name.ends_with("mlp.gate.weight");
    const bool adds = spec.name.ends_with("down_proj") || spec.name.ends_with("o_proj.weight") ||
                      spec.name.ends_with("down_proj.weight");
    if (!code && !gate && !adds) return;
    const Tensor w = Tensor::Empty(spec.shape, ComputeType(c_.dtype));
    nn::DrawNormal(kSeed, spec.name, c_.config.initializer_range * (code ? 1 : 0x1p-6), 0, w);
    const std::int64_t experts = c_.config.num_local_experts;
    const auto set = [&](std::int64_t row, std::int64_t column, double value) {
      DispatchFloat("layout_case", w.dtype(), [&](auto tag) {
        using T = typename decltype(tag)::type;
        w.data<T>()[row * spec.shape[1] + column] = static_cast<T>(value);
      });
    };
    for (std::int64_t row = 0; (code || gate) && row < spec.shape[0]; ++row) {
      std::vector<double> order(static_cast<std::size_t>(experts));
      for (std::size_t e = 0; e < order.size(); ++e) {
        order[e] = 1.5 - 3.0 * static_cast<double>(e) / static_cast<double>(experts - 1);
      }
      // The row-th permutation; forced: all tokens have the first.
      for (std::int64_t i = 0; !c_.one_routing && i < row * 5 % 24; ++i) {
        std::prev_permutation(order.begin(), order.end());
      }
      for (std::int64_t e = 0; e < experts; ++e) {
        set(row, e, code ? order[static_cast<std::size_t>(e)] : row == e ? 1 : 0);
      }
    }
    m_.store.Assign(spec.name, w);
  }

  quant::AmaxReducer* Amax() { return c_.local_amax || mesh_.size() == 1 ? nullptr : &amax_; }

  quant::AutocastOptions Scope(bool record) {
    return {{}, &scaling_, record, record ? Amax() : nullptr};
  }

  std::vector<data::Batch> Mine(const data::GlobalBatch& batch) const {
    const std::int64_t rows =
        layout_.micro_rows > 0 ? layout_.micro_rows : c_.rows / layout_.ranks();
    std::vector<data::Batch> mine = MicroBatchesOf(batch, rows, mesh_.rank(), mesh_.size());
    for (data::Batch& b : mine) b = Pad(b, c_.padding);
    return mine;
  }

  // The last bit of a weight that every rank has.
  void Drift() {
    auto bits = m_.store.parameters().front().master.span<float>();
    bits[0] = std::nextafter(bits[0], 2 * bits[0]);
  }

  // The weights as they were; nothing where none is moved.
  std::vector<Tensor> PerturbModelWeights(std::int64_t step) {
    std::vector<Tensor> exact;
    if (c_.perturb_model_weights == 0 && c_.perturb_gradients == 0) return exact;
    for (auto& p : m_.store.parameters()) {
      exact.push_back(p.master.Clone());
      const Signs sign(c_.perturb_seed, p.spec.name, step);
      const auto values = p.master.span<double>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] *= 1 + c_.perturb_model_weights * sign(static_cast<std::int64_t>(i));
      }
    }
    return exact;
  }

  void PerturbGradients(std::int64_t step, std::size_t micro_batch) {
    for (auto& p : m_.store.parameters()) {
      if (!p.has_grad || !p.spec.HasNarrowGradient()) continue;
      const Signs sign(c_.perturb_seed, fmt::format("{}/{}", p.spec.name, micro_batch), step);
      const auto values = p.grad.span<double>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] *= 1 + c_.perturb_gradients * sign(static_cast<std::int64_t>(i));
      }
    }
  }

  StepResult Step(const data::GlobalBatch& batch, std::int64_t step,
                  const std::vector<Tensor>& exact) {
    const quant::Autocast autocast(c_.recipe, Scope(true));
    const std::vector<data::Batch> micro = Mine(batch);
    const StepResult result =
        exact.empty() ? TrainStep(ctx_, m_, optimizer_, micro, batch.totals, c_.lr, kSeed)
                      : PerturbedStep(micro, batch.totals, step, exact);
    scaling_.EndStep(ctx_, Amax());
    return result;
  }

  // TrainStep of one rank with weights that are off while gradients are computed, and back for the
  // update.
  StepResult PerturbedStep(std::span<const data::Batch> micro, const data::BatchTotals& totals,
                           std::int64_t step, const std::vector<Tensor>& exact) {
    model::LossSums sums = model::LossSums::Zeros(ctx_, c_.config);
    const model::LossScale scale{Tensor::Scalar(1 / totals.weight_sum),
                                 Tensor::Scalar(1 / static_cast<double>(totals.tokens))};
    model::StepNoise noise{kSeed,
                           Tensor::FromSpan<std::int64_t>({1}, std::array{step}).Reshape({})};
    for (std::size_t k = 0; k < micro.size(); ++k) {
      m_.model.TrainMicroBatch(micro[k], scale, sums, noise);
      if (c_.perturb_gradients != 0) PerturbGradients(step, k);
    }
    std::size_t i = 0;
    for (auto& p : m_.store.parameters()) CopyTo(exact[i++], p.master);
    StepResult r;
    r.loss = sums.weighted_nll.item() / totals.weight_sum;
    r.aux_loss = sums.aux_loss.item();
    for (std::int64_t l = 0; l < c_.config.num_hidden_layers; ++l) {
      if (c_.config.moe_aux_loss_coeff > 0) {
        r.layer_aux_loss.push_back(ElementAsDouble(sums.layer_aux_loss, l));
      }
      if (c_.config.moe_z_loss_coeff > 0) r.z_loss.push_back(ElementAsDouble(sums.z_loss, l));
      const auto counts = sums.expert_counts.Select(l).span<std::int64_t>();
      r.expert_counts.emplace_back(counts.begin(), counts.end());
    }
    r.grad_norm = optimizer_.ComputeGradNorm();
    optimizer_.Update(c_.lr);
    m_.model.UpdateExpertBias(sums);
    return r;
  }

  // Of one rank: by what the routers choose experts in this step, but for jitter.
  void RecordScores(const data::GlobalBatch& batch, LayoutRun& run) {
    const quant::Autocast autocast(c_.recipe, Scope(false));
    const auto logits = m_.model.ComputeLogits(batch.MicroBatch(0, c_.rows)).router_logits;
    std::vector<double> scores;
    for (std::size_t layer = 0; layer < logits.size(); ++layer) {
      const Tensor bias = m_.store.buffers().empty() ? Tensor() : m_.store.buffers()[layer].value;
      const Tensor& l = logits[layer];
      for (std::int64_t i = 0; i < l.numel(); ++i) {
        double s = ElementAsDouble(l, i);
        if (c_.config.scoring_func == model::ScoringFunc::kSigmoid) s = 1 / (1 + std::exp(-s));
        if (bias) s += ElementAsDouble(bias, i % l.dim(1));
        scores.push_back(s);
      }
    }
    run.scores.push_back(Tensor::FromSpan<double>({static_cast<std::int64_t>(scores.size())},
                                                  std::span<const double>(scores)));
  }

  double HeldoutLoss() {
    const quant::Autocast autocast(c_.recipe, Scope(false));
    const data::GlobalBatch batch = MakeGlobalBatch(0, c_);
    const Tensor sum = Tensor::Zeros({1}, DType::kF64);
    for (const data::Batch& b : Mine(batch)) {
      const Tensor nll = m_.model.Evaluate(b);
      for (std::int64_t t = 0; t < nll.numel(); ++t) {
        *sum.data<double>() +=
            static_cast<double>(b.weights.data<float>()[t]) * ElementAsDouble(nll, t);
      }
    }
    mesh_.world().AllReduce(sum);
    return *sum.data<double>() / batch.totals.weight_sum;
  }

  const LayoutCase& c_;
  const Layout& layout_;
  ops::Context ctx_;
  parallel::Mesh mesh_;
  model::LocalMixtral m_;
  optim::AdamWOptimizer optimizer_;
  quant::ScalingStates scaling_;
  parallel::MeshAmaxReducer amax_{mesh_};
};

}  // namespace

std::string Layout::Name() const {
  return fmt::format(
      "dp {} × ep {}{}, {}", dp, ep, sharded ? ", sharded" : "",
      micro_rows > 0 ? fmt::format("{} rows at once", micro_rows) : "all rows at once");
}

model::MixtralConfig TableConfig() {
  model::MixtralConfig c;
  c.vocab_size = 11;
  c.hidden_size = 16;
  c.intermediate_size = 12;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 2;
  c.num_key_value_heads = 1;
  c.num_local_experts = 4;
  c.num_experts_per_tok = 2;
  c.max_position_embeddings = 16;
  c.initializer_range = 0.4;
  c.router_aux_loss_coef = 0.1;
  c.output_router_logits = true;
  c.aux_scope = model::AuxScope::kSequence;
  return c;
}

LayoutRun TrainLayout(const LayoutCase& c, const Layout& layout) {
  LayoutRun run;
  std::mutex mutex;
  std::map<std::string, Tensor> seen;
  comm::RunRanks(static_cast<int>(layout.ranks()), [&](comm::Communicator& world) {
    const auto wrapped = c.wrap ? c.wrap(world) : nullptr;
    Rank(c, layout, wrapped ? *wrapped : world).Train(run, mutex, seen);
  });
  return run;
}

std::map<std::string, Tensor> QuantitiesOf(const LayoutRun& run) {
  std::map<std::string, Tensor> all;
  for (std::size_t i = 0; i < run.steps.size(); ++i) {
    const StepResult& s = run.steps[i];
    const auto add = [&](const char* name, double value) {
      all[fmt::format("{}/{}", name, i + 1)] = Scalar(value);
    };
    add("loss", s.loss);
    add("aux_loss", s.aux_loss);
    add("grad_norm", s.grad_norm);
    for (std::size_t l = 0; l < s.layer_aux_loss.size(); ++l) {
      add(l == 0 ? "layer_aux_loss.0" : "layer_aux_loss.1", s.layer_aux_loss[l]);
    }
    for (std::size_t l = 0; l < s.z_loss.size(); ++l)
      add(l == 0 ? "z_loss.0" : "z_loss.1", s.z_loss[l]);
  }
  for (const auto& [name, t] : run.gradients) all["gradient/" + name] = t;
  for (const auto& [name, t] : run.state) {
    if (!name.starts_with("moment")) all[name] = t;
  }
  for (std::size_t i = 0; i < run.scores.size(); ++i)
    all[fmt::format("scores/{}", i + 1)] = run.scores[i];
  all["heldout"] = Scalar(run.heldout);
  return all;
}

double SmallestGap(const Tensor& scores, std::int64_t experts, std::int64_t top_k) {
  double smallest = std::numeric_limits<double>::infinity();
  const auto s = scores.span<double>();
  for (auto token = s.begin(); token != s.end(); token += experts) {
    std::vector<double> sorted(token, token + experts);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const auto k = static_cast<std::size_t>(top_k);
    smallest = std::min(smallest, sorted[k - 1] - sorted[k]);
  }
  return smallest;
}

double Distance(const Tensor& a, const Tensor& b) {
  double largest = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const double d = std::abs(ElementAsDouble(a, i) - ElementAsDouble(b, i));
    if (std::isnan(d)) return d;
    largest = std::max(largest, d);
  }
  return largest;
}

double Largest(const Tensor& a) {
  double largest = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    largest = std::max(largest, std::abs(ElementAsDouble(a, i)));
  }
  return largest;
}

}  // namespace cistron::train
