// AdamW over all parameters of a store, with clipping by the global norm.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cistron/nn/parameter.h"
#include "cistron/nn/statistics_reducer.h"
#include "cistron/ops/optimizer/adamw.h"

namespace cistron::optim {

struct AdamWOptions {
  ops::AdamWConfig adamw;      // betas, eps, weight_decay
  double max_grad_norm = 1.0;  // 0: no clipping
  bool decay_embeddings = false;
  bool decay_all = false;  // true: norms, biases and embeddings too, as torch does without groups
};

class AdamWOptimizer {
 public:
  // The store must outlive the optimiser and have all its parameters registered. Moments start at
  // zero. `ranks`, which must outlive it too, sums the gradient norm over the ranks that hold parts
  // of the parameters; null: all of them are here.
  AdamWOptimizer(const ops::Context& ctx, nn::LocalParameterStore& store,
                 const AdamWOptions& options, nn::StatisticsReducer* ranks = nullptr);

  // L2 norm of all gradients, before clipping, in fp64; sets the factor that Update applies. Call
  // it once every gradient of the step is there; a norm that is NaN or Inf must not be followed by
  // Update.
  double ComputeGradNorm();

  // The same in two parts that do not wait, for a step that a device makes by itself. The norm is
  // left in norm(); QueueUpdate reads rate and number of the update, f64 [], when it runs, and
  // changes nothing where GateUpdate has made clip() NaN. CountUpdate is what a replay of a
  // captured QueueUpdate needs on the host.
  void QueueGradNorm();
  void QueueUpdate(const Tensor& lr, const Tensor& step);
  void CountUpdate();
  const Tensor& norm() const { return norm_; }          // f64 []
  const Tensor& clip() const { return scalars_.clip; }  // f64 []

  // One update with learning rate `lr`; counts the step. Parameters without a gradient stay as they
  // are. Gradients are forgotten afterwards.
  void Update(double lr);

  // Number of updates made so far.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step) { step_ = step; }

  // What a checkpoint must hold besides the step, and what Restore-ing code writes into: names are
  // "weight/NAME", "master/NAME" (bf16 models with masters only), "moment1/NAME", "moment2/NAME".
  // Tensors are shared; of a shard that is several boxes of one name each is there, of an empty one
  // an empty box.
  struct StateTensor {
    std::string name;
    Tensor tensor;
    Shape global_shape, start;  // of which global tensor `tensor` is a box, and where it begins
    bool counted = true;        // false: another rank holds the same values and saves them
  };
  std::vector<StateTensor> State() const;

  // Name of the first parameter whose gradient holds a NaN or Inf; empty when there is none.
  std::string FirstNonFiniteGradient() const;

 private:
  struct Moments {
    Tensor m, v;
  };
  ops::Context ctx_;
  nn::LocalParameterStore& store_;
  AdamWOptions options_;
  nn::StatisticsReducer* ranks_;
  std::vector<Moments> moments_;
  std::int64_t step_ = 0;
  ops::AdamWScalars scalars_;
  Tensor sum_of_squares_, norm_;
};

}  // namespace cistron::optim
