#include "cistron/train/step_runner.h"

#include <fmt/format.h>

#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/capture_policy.h"

namespace cistron::train {

// What the kernels of every step read and write, where a graph finds it again.
struct StepRunner::DeviceState {
  explicit DeviceState(const ops::Context& ctx, const model::MixtralConfig& config)
      : pool(ctx.device()), sums(ctx, config), gate(ctx.Zeros({}, DType::kF64)) {}

  cuda::MemoryPool pool;
  StepSums sums;
  Tensor gate;
  Tensor inputs;  // u8: what Slot::staging brought
  std::deque<Slot> slots;
  std::unique_ptr<cuda::Graph> graph;  // of the step before
  CapturePolicy policy;
};

StepRunner::StepRunner(const ops::Context& ctx, model::LocalMixtral& m,
                       optim::AdamWOptimizer& optimizer, const Options& options)
    : ctx_(ctx),
      m_(m),
      optimizer_(optimizer),
      options_(options),
      on_device_(ctx.device().type == DeviceType::kCuda) {
  if (on_device_) device_ = std::make_unique<DeviceState>(ctx, m.model.config());
}

StepRunner::~StepRunner() {
  if (!on_device_) return;
  try {
    cuda::Synchronize(ctx_.device());
  } catch (const Error& error) {
    LogWarning("{}", error.message());
  }
}

StepInputs StepRunner::Prepare(std::span<const data::Batch> micro_batches,
                               const data::BatchTotals& totals) const {
  if (on_device_) {
    for (const data::Batch& batch : micro_batches) m_.model.CheckBatch(batch);
    return PackStep(micro_batches, totals, cuda::PinnedAllocator());
  }
  StepInputs inputs;
  inputs.batches.assign(micro_batches.begin(), micro_batches.end());
  inputs.totals = totals;
  return inputs;
}

void StepRunner::Start(StepInputs inputs, double lr) {
  CISTRON_CHECK(in_flight() < Depth(), "StepRunner: {} steps are in flight", in_flight());
  Flight flight;
  flight.lr = lr;
  flight.step = optimizer_.step() + 1;
  flight.inputs = std::move(inputs);
  if (const quant::Autocast* scope = quant::Autocast::Current()) {
    flight.recipe.emplace(scope->recipe(), scope->options());
  }
  if (on_device_) {
    WarnOfNoWeight(flight.step, flight.inputs.totals);
    StepScalars::Set(flight.inputs.block, lr, flight.step, flight.inputs.totals);
    return QueueFlight(std::move(flight));
  }
  flight.result = TrainStep(ctx_, m_, optimizer_, flight.inputs.batches, flight.inputs.totals, lr,
                            options_.seed);
  flights_.push_back(std::move(flight));
}

void StepRunner::QueueFlight(Flight flight) {
  std::optional<quant::Autocast> scope;
  if (flight.recipe) scope.emplace(flight.recipe->first, flight.recipe->second);
  flight.slot = next_slot_;
  Queue(flight.inputs);
  flights_.push_back(std::move(flight));
}

// The gate kept the model as it was before the first of them, so all are as they were when they
// were queued; what they are functions of, batches, rates and steps, they still have.
void StepRunner::Redo(Flight first, const StepResult& result) {
  cuda::Synchronize(ctx_.device());
  device_->graph.reset();
  std::deque<Flight> again = std::move(flights_);
  flights_.clear();
  ++first.redone;
  again.push_front(std::move(first));
  optimizer_.set_step(again.front().step - 1);
  PrepareAgain(m_, again.front().step, result);
  FillZero(device_->gate);
  for (Flight& flight : again) QueueFlight(std::move(flight));
}

void StepRunner::Queue(const StepInputs& inputs) {
  DeviceState& d = *device_;
  const Device device = ctx_.device();
  while (d.slots.size() < 2) d.slots.emplace_back(device);
  Slot& slot = d.slots[next_slot_];
  next_slot_ = (next_slot_ + 1) % 2;
  const auto bytes = static_cast<std::size_t>(inputs.block.bytes());
  if (!d.inputs || d.inputs.bytes() != inputs.block.bytes()) {
    d.graph.reset();
    d.inputs = ctx_.Empty(inputs.block.shape(), DType::kU8);
  }
  if (!slot.staging || slot.staging.bytes() != inputs.block.bytes()) {
    slot.staging = ctx_.Empty(inputs.block.shape(), DType::kU8);
    slot.upload.Release();  // the memory may have been another's, on the main stream
  }
  slot.upload.Start(slot.staging.raw(), inputs.block.raw(), bytes);
  slot.upload.Join();
  cuda::CopyLater(d.inputs.raw(), slot.staging.raw(), device, bytes);
  slot.upload.Release();
  Run(inputs);
  if (!slot.results) {
    slot.results = Tensor::Empty(d.sums.block.shape(), DType::kF64, cuda::PinnedAllocator());
  }
  cuda::CopyLater(slot.results.raw(), d.sums.block.raw(), device,
                  static_cast<std::size_t>(d.sums.block.bytes()));
  slot.done.Record();
}

void StepRunner::Run(const StepInputs& inputs) {
  DeviceState& d = *device_;
  const bool timed = ctx_.recorder() != nullptr && ctx_.recorder()->Times();
  const auto queue = [&] {
    QueueStep(ctx_, m_, optimizer_, BatchesIn(d.inputs, inputs), StepScalars::In(d.inputs),
              options_.seed, d.gate, d.sums);
  };
  newest_is_replay_ = false;
  if (timed) return queue();
  using Action = CapturePolicy::Action;
  const Action action = d.policy.Next(inputs.layout, d.graph != nullptr);
  if (action == Action::kReplay) {
    newest_is_replay_ = true;
    d.graph->Launch();
    optimizer_.CountUpdate();
    ++replays_;
    return;
  }
  d.graph.reset();
  const std::string why_not = WhyNotCaptured();
  if (!why_not.empty()) note_ = why_not;
  if (action == Action::kCapture && why_not.empty() && Capture(inputs)) return;
  // The pool too: what this step makes and keeps, gradients for one, a capture may use.
  const cuda::MemoryPool::Scope scope(d.pool);
  queue();
}

std::string StepRunner::WhyNotCaptured() const {
  const quant::Autocast* scope = quant::Autocast::Current();
  if (options_.graph == CudaGraph::kOff) return "not captured: train.cuda_graph=off";
  if (m_.mesh != nullptr && m_.mesh->size() > 1) {
    const bool by_host = m_.expert_ranks != nullptr && m_.expert_ranks->peers() == nullptr;
    return by_host ? fmt::format(
                         "not captured: the host of each of {} ranks reads how many rows "
                         "travel",
                         m_.mesh->size())
                   : fmt::format("not captured: {} ranks exchange", m_.mesh->size());
  }
  if (scope != nullptr && quant::Quantizes(scope->recipe())) {
    return fmt::format("not captured: {} keeps state on the host", quant::Name(scope->recipe()));
  }
  const CapturePolicy& policy = device_->policy;
  if (policy.exhausted()) {
    return fmt::format("no longer captured: the shapes changed after {} captures",
                       policy.captures());
  }
  if (policy.changes()) return "not captured: the shapes differ from step to step";
  return {};
}

bool StepRunner::Capture(const StepInputs& inputs) {
  DeviceState& d = *device_;
  const std::int64_t step = optimizer_.step();
  d.policy.CountCapture();
  try {
    const cuda::MemoryPool::Scope scope(d.pool);
    d.graph = std::make_unique<cuda::Graph>(ctx_.device(), [&] {
      QueueStep(ctx_, m_, optimizer_, BatchesIn(d.inputs, inputs), StepScalars::In(d.inputs),
                options_.seed, d.gate, d.sums);
    });
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOutOfMemory) throw;
    optimizer_.set_step(step);
    m_.store.ZeroGradients();
    note_ = fmt::format("not captured: {}", error.message());
    options_.graph = CudaGraph::kOff;
    return false;
  }
  note_ = fmt::format("captured in a CUDA graph of {} nodes", d.graph->nodes());
  newest_is_replay_ = true;
  d.graph->Launch();
  ++replays_;
  return true;
}

StepResult StepRunner::Finish() {
  CISTRON_CHECK(in_flight() > 0, "StepRunner: no step is in flight");
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  if (!on_device_) return std::move(flight.result);
  bool finite = true;
  StepResult result;
  while (true) {
    Slot& slot = device_->slots[flight.slot];
    slot.done.Wait();
    result = ReadStep(slot.results, m_.model.config(), flight.inputs.totals, finite);
    result.redone = flight.redone;
    if (!result.overflow) break;
    Redo(std::move(flight), result);
    flight = std::move(flights_.front());
    flights_.pop_front();
  }
  if (finite) return result;
  // The gate kept the model as it was before this step, whatever is queued behind. Made once more,
  // waiting, the step says where it fails.
  cuda::Synchronize(ctx_.device());
  flights_.clear();
  device_->graph.reset();
  optimizer_.set_step(flight.step - 1);
  m_.store.ZeroGradients();
  std::optional<quant::Autocast> scope;
  if (flight.recipe) scope.emplace(flight.recipe->first, flight.recipe->second);
  TrainStep(ctx_, m_, optimizer_, flight.inputs.batches, flight.inputs.totals, flight.lr,
            options_.seed);
  CISTRON_THROW(
      kNumericalFailure,
      "step {}: the loss is {} and the gradient norm {}; made once more, they were finite",
      flight.step, result.loss, result.grad_norm);
}

}  // namespace cistron::train
