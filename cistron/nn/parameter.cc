#include "cistron/nn/parameter.h"

#include <algorithm>
#include <utility>

#include "cistron/base/log.h"
#include "cistron/base/philox.h"
#include "cistron/base/threads.h"
#include "cistron/nn/sharded_transfers.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"

namespace cistron::nn {

void DrawNormal(std::uint64_t seed, std::string_view name, double std, std::int64_t begin,
                const Tensor& out) {
  if (!OnHost(out)) {
    const Tensor host = Tensor::Empty(out.shape(), out.dtype());
    DrawNormal(seed, name, std, begin, host);
    return CopyTo(host, out);
  }
  const RandomStream stream(seed, name);
  DispatchFloat("DrawNormal", out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* values = out.data<T>();
    ParallelFor(out.numel(), 1 << 12, [&](std::int64_t i) {
      const double normal = stream.Normal(static_cast<std::uint64_t>(begin + i));
      values[i] = T(static_cast<Compute<T>>(std * normal));
    });
  });
}

namespace {

// The flat index in the global tensor of the first element that is here.
std::int64_t FlatStart(const LocalParameterStore::Parameter& p) {
  return p.start[0] * (p.local_shape.numel() / p.local_shape[0]) + p.shard_begin;
}

// Of a tensor: its last dimension; of a vector 1, so that its elements are rows.
std::int64_t RowWidth(const Shape& shape) {
  return shape.rank() < 2 ? 1 : shape[shape.rank() - 1];
}

// Elements of each of `ranks` shards of whole rows.
std::vector<std::int64_t> ShardCounts(const Shape& shape, std::int64_t ranks) {
  const std::int64_t width = RowWidth(shape), rows = shape.numel() / width;
  std::vector<std::int64_t> counts;
  for (std::int64_t r = 0; r < ranks; ++r) {
    counts.push_back((rows * (r + 1) / ranks - rows * r / ranks) * width);
  }
  return counts;
}

void FillOnes(const Tensor& t) {
  const auto n = static_cast<std::size_t>(t.numel());
  Convert(Tensor::FromSpan<float>(t.shape(), std::vector<float>(n, 1.0f)), t);
}

}  // namespace

void CheckVersionOfForward(const ParameterStore& store, std::uint64_t version_of_forward,
                           std::string_view op) {
  CISTRON_CHECK(version_of_forward == store.version(),
                "{}: the parameters changed after the forward pass that this backward belongs to; "
                "run backward before the optimiser's update",
                op);
}

LocalParameterStore::LocalParameterStore(const ops::Context& ctx, DType dtype, bool masters,
                                         const ParameterPartition& partition)
    : ctx_(ctx),
      dtype_(dtype),
      masters_(masters),
      partition_(partition),
      gradient_dtype_(ComputeType(dtype)) {
  if (partition.exchange != nullptr) {
    gathered_ = std::make_unique<GatheredWeights>(ctx, *partition.exchange);
    transfers_ = std::make_unique<GradientTransfers>(*partition.exchange);
  }
  CISTRON_CHECK(dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16,
                "parameters: a model's dtype is f64, f32 or bf16, not {}", Name(dtype));
}

ParameterId LocalParameterStore::Register(const ParameterSpec& spec) {
  CISTRON_CHECK(Find(spec.name) == nullptr, "parameters: '{}' is registered twice", spec.name);
  Parameter p;
  p.spec = spec;
  Shape shape = p.start = spec.shape;
  for (int d = 0; d < shape.rank(); ++d) p.start[d] = 0;
  p.counted = spec.is_expert ? partition_.counts_experts : partition_.counts_dense;
  if (spec.is_expert) {
    CISTRON_CHECK(shape[0] % partition_.expert_ranks == 0,
                  "parameters: the {} experts of '{}' cannot be dealt evenly to {} ranks", shape[0],
                  spec.name, partition_.expert_ranks);
    shape[0] /= partition_.expert_ranks;
    p.start[0] = partition_.expert_rank * shape[0];
  }
  p.local_shape = shape;
  const ParameterPartition::Shards& shards = spec.is_expert ? partition_.experts : partition_.dense;
  if (shards.ranks > 1) {
    p.counted = true;
    p.shard_counts = ShardCounts(shape, shards.ranks);
    for (std::int64_t r = 0; r < shards.rank; ++r) {
      p.shard_begin += p.shard_counts[static_cast<std::size_t>(r)];
    }
    const std::int64_t width = RowWidth(shape);
    const std::int64_t rows = p.shard_counts[static_cast<std::size_t>(shards.rank)] / width;
    shape = spec.shape.rank() < 2 ? Shape({rows}) : Shape({rows, width});
  }
  p.value = ctx_.Zeros(shape, dtype_);
  const DType master = masters_ ? ComputeType(dtype_) : dtype_;
  p.master = master == dtype_ ? p.value : ctx_.Zeros(shape, master);
  parameters_.push_back(std::move(p));
  return static_cast<ParameterId>(parameters_.size()) - 1;
}

Tensor LocalParameterStore::RegisterBuffer(const BufferSpec& spec) {
  CISTRON_CHECK(Find(spec.name) == nullptr && FindBuffer(spec.name) == nullptr,
                "parameters: '{}' is registered twice", spec.name);
  buffers_.push_back({spec.name, ctx_.Zeros(spec.shape, ComputeType(dtype_))});
  return buffers_.back().value;
}

LocalParameterStore::~LocalParameterStore() {
  // Transfers of a pass that ended in an exception still use these tensors.
  try {
    if (transfers_) transfers_->Abandon();
    if (gathered_) gathered_->Drop();
  } catch (const std::exception& e) {
    LogDebug("parameters: transfers of a rank that ends: {}", e.what());
  }
}

Tensor LocalParameterStore::Acquire(ParameterId id) {
  const Parameter& p = parameters_.at(static_cast<std::size_t>(id));
  return p.IsSharded() ? gathered_->Acquire(id, parameters_) : p.value;
}

void LocalParameterStore::Release(ParameterId id) {
  if (parameters_.at(static_cast<std::size_t>(id)).IsSharded()) gathered_->Release(id);
}

QuantizedTensor LocalParameterStore::AcquireQuantized(ParameterId id, const quant::Recipe& recipe) {
  Parameter& p = parameters_.at(static_cast<std::size_t>(id));
  Parameter::QuantizedWeight& q = p.quantized;
  const quant::Autocast* scope = quant::Autocast::Current();
  const bool delayed = std::holds_alternative<quant::DelayedScaling>(recipe);
  const quant::ScalingStates* states =
      delayed && scope != nullptr ? scope->options().states : nullptr;
  const std::uint64_t scales = states == nullptr ? 0 : states->version();
  if (q.version != version_ || !(q.recipe == recipe) || q.scales != scales) {
    Tensor master = p.master;
    if (p.IsSharded()) {
      // Codes are kept whole until the weights change: one gathering of the masters for all passes.
      master = ctx_.Empty(p.local_shape, p.master.dtype());
      const auto group =
          p.spec.is_expert ? RankExchange::Group::kReplicas : RankExchange::Group::kAll;
      partition_.exchange->Gather(group, p.master, p.shard_counts, master)();
    }
    q.tensor = quant::QuantizeOperand(ctx_, recipe,
                                      {.role = quant::TensorRole::kWeight,
                                       .name = p.spec.name,
                                       .owner = this,
                                       .is_expert = p.spec.is_expert,
                                       .x = master,
                                       .row_parts = p.spec.row_parts});
    q.recipe = recipe;
    q.version = version_;
    q.scales = scales;
  }
  return q.tensor;
}

void LocalParameterStore::SetRowParts(ParameterId id, std::int64_t parts) {
  ParameterSpec& spec = parameters_.at(static_cast<std::size_t>(id)).spec;
  if (spec.row_parts == parts) return;
  spec.row_parts = parts;
  MarkChanged();
}

ops::Output LocalParameterStore::GradientOutput(ParameterId id) {
  Parameter& p = parameters_.at(static_cast<std::size_t>(id));
  const DType dtype = p.spec.HasNarrowGradient() ? gradient_dtype_ : ComputeType(dtype_);
  if (transfers_) transfers_->Begin(id, parameters_);
  if (!p.grad) p.grad = ctx_.Empty(p.value.shape(), dtype);
  if (p.IsSharded() && !p.whole_grad) p.whole_grad = ctx_.Empty(p.local_shape, dtype);
  p.square_sums = {};
  const auto mode = p.has_grad ? ops::WriteMode::kAccumulate : ops::WriteMode::kWrite;
  p.has_grad = true;
  return {p.IsSharded() ? p.whole_grad : p.grad, mode};
}

void LocalParameterStore::GradientsWritten() {
  if (transfers_) transfers_->Written(parameters_);
}

void LocalParameterStore::ExpectMicroBatches(std::int64_t count) {
  if (!transfers_) return;
  gathered_->BeginStep();
  transfers_->Expect(count);
}

void LocalParameterStore::FinishGradients() {
  if (!transfers_) return;
  transfers_->Finish(parameters_);
  gathered_->Drop();
}

std::vector<LocalParameterStore::Box> LocalParameterStore::BoxesOf(const Parameter& p,
                                                                   const Tensor& values) {
  if (!p.IsSharded()) return {{values, p.start}};
  if (p.local_shape.rank() < 3) {
    Shape start = p.start;
    start[0] += p.shard_begin / RowWidth(p.local_shape);
    return {{values, start}};
  }
  // Rows of experts, cut where one expert ends.
  std::vector<Box> boxes;
  const std::int64_t rows = p.local_shape[1], width = p.local_shape[2];
  const std::int64_t first = p.shard_begin / width;
  for (std::int64_t row = 0; row < values.dim(0);) {
    const std::int64_t expert = (first + row) / rows, begin = (first + row) % rows;
    std::int64_t experts = 1, take = std::min(rows - begin, values.dim(0) - row);
    if (begin == 0 && take == rows) {
      experts = (values.dim(0) - row) / rows;
      take = experts * rows;
    }
    boxes.push_back({values.Slice(0, row, take).Reshape({experts, take / experts, width}),
                     {p.start[0] + expert, begin, 0}});
    row += take;
  }
  if (boxes.empty()) boxes.push_back({values.Reshape({0, rows, width}), p.start});
  return boxes;
}

void LocalParameterStore::Initialize(std::uint64_t seed, double std) {
  for (const Buffer& b : buffers_) FillZero(b.value);
  for (Parameter& p : parameters_) {
    switch (p.spec.init) {
      case ParameterSpec::Init::kNormal:
        DrawNormal(seed, p.spec.name, std, FlatStart(p), p.master);
        break;
      case ParameterSpec::Init::kZeros: FillZero(p.master); break;
      case ParameterSpec::Init::kOnes: FillOnes(p.master); break;
    }
    if (p.value.raw() != p.master.raw()) Convert(p.master, p.value);
  }
  MarkChanged();
}

void LocalParameterStore::Assign(std::string_view name, const Tensor& values) {
  if (const Buffer* b = FindBuffer(name)) {
    CISTRON_CHECK(values.shape() == b->value.shape(), "parameters: '{}' has shape {}, given {}",
                  name, ToString(b->value.shape()), Describe(values));
    Convert(values, b->value);
    return;
  }
  Parameter* p = Find(name);
  if (p == nullptr) CISTRON_THROW(kNotFound, "parameters: the model has no '{}'", name);
  CISTRON_CHECK(values.shape() == p->spec.shape, "parameters: '{}' has shape {}, given {}", name,
                ToString(p->spec.shape), Describe(values));
  Tensor mine = values.Slice(0, p->start[0], p->local_shape[0]);
  if (p->IsSharded()) {
    mine = mine.Reshape({mine.numel()})
               .Slice(0, p->shard_begin, p->master.numel())
               .Reshape(p->master.shape());
  }
  Convert(mine, p->master);
  if (p->value.raw() != p->master.raw()) Convert(p->master, p->value);
  MarkChanged();
}

void LocalParameterStore::Rename(std::string_view from, std::string_view to) {
  Parameter* p = Find(from);
  CISTRON_CHECK(p != nullptr && Find(to) == nullptr && FindBuffer(to) == nullptr,
                "parameters: '{}' cannot be renamed '{}'", from, to);
  p->spec.name = to;
  p->quantized = {};
}

void LocalParameterStore::ZeroGradients() {
  for (Parameter& p : parameters_) {
    p.has_grad = false;
    p.square_sums = {};  // small, but it may hold on to a captured step's memory
  }
  if (transfers_) transfers_->Abandon();
}

const LocalParameterStore::Buffer* LocalParameterStore::FindBuffer(std::string_view name) const {
  for (const Buffer& b : buffers_) {
    if (b.name == name) return &b;
  }
  return nullptr;
}

const LocalParameterStore::Parameter* LocalParameterStore::Find(std::string_view name) const {
  for (const Parameter& p : parameters_) {
    if (p.spec.name == name) return &p;
  }
  return nullptr;
}

LocalParameterStore::Parameter* LocalParameterStore::Find(std::string_view name) {
  return const_cast<Parameter*>(std::as_const(*this).Find(name));
}

}  // namespace cistron::nn
