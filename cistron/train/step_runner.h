// Steps of training, one after the other: on a GPU captured in a CUDA graph where their shapes stay
// the same, and queued ahead, so that the device never waits for the host.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cistron/quant/autocast.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/tensor/cuda_graph.h"
#include "cistron/train/run_config.h"
#include "cistron/train/step_inputs.h"
#include "cistron/train/training_step.h"

namespace cistron::train {

class StepRunner {
 public:
  struct Options {
    CudaGraph graph = CudaGraph::kAuto;
    std::uint64_t seed = 0;  // of the run
  };
  // All must outlive the runner. Each step follows the recipe that is in force at its Start, also
  // where it is made again; what its options point to must live until it is finished.
  StepRunner(const ops::Context& ctx, model::LocalMixtral& m, optim::AdamWOptimizer& optimizer,
             const Options& options);
  // Waits for the device.
  ~StepRunner();

  // Checks micro-batches and brings them into the form that Start takes; on any thread.
  StepInputs Prepare(std::span<const data::Batch> micro_batches,
                     const data::BatchTotals& totals) const;

  // Queues a step; on a CPU makes it. At most Depth() steps are in flight.
  void Start(StepInputs inputs, double lr);
  // Waits for the oldest step in flight. Throws kNumericalFailure as TrainStep does; steps queued
  // behind it have changed nothing then.
  StepResult Finish();

  int Depth() const { return on_device_ ? 2 : 1; }
  int in_flight() const { return static_cast<int>(flights_.size()); }

  // How steps run, for people: "captured in a CUDA graph of 412 nodes", or why they are not; empty
  // before that is known.
  const std::string& note() const { return note_; }
  // Steps that ran as replays of a graph.
  std::int64_t replays() const { return replays_; }
  // Whether the newest step is one; true also where it failed.
  bool newest_is_replay() const { return newest_is_replay_; }

 private:
  struct Flight {
    StepInputs inputs;
    double lr = 0;
    std::int64_t step = 0;
    std::size_t slot = 0;
    StepResult result;  // of a CPU
    int redone = 0;
    // What was in force when it was started.
    std::optional<std::pair<quant::Recipe, quant::AutocastOptions>> recipe;
  };
  // What a step in flight has for itself.
  struct Slot {
    explicit Slot(Device device) : upload(device), done(device) {}
    cuda::Upload upload;
    Tensor staging;  // u8, on the device
    Tensor results;  // pinned
    cuda::Event done;
  };
  struct DeviceState;

  void QueueFlight(Flight flight);
  // Steps in flight from one that overflowed on, again.
  void Redo(Flight first, const StepResult& result);
  void Queue(const StepInputs& inputs);
  void Run(const StepInputs& inputs);
  // Why steps cannot be captured; empty where they can.
  std::string WhyNotCaptured() const;
  bool Capture(const StepInputs& inputs);

  ops::Context ctx_;
  model::LocalMixtral& m_;
  optim::AdamWOptimizer& optimizer_;
  Options options_;
  bool on_device_;
  std::deque<Flight> flights_;
  std::size_t next_slot_ = 0;
  std::unique_ptr<DeviceState> device_;
  std::string note_;
  std::int64_t replays_ = 0;
  bool newest_is_replay_ = false;
};

}  // namespace cistron::train
