// For tests only: a tiny model that is trained for some steps on a layout of ranks, which are
// threads, and what it leaves, put together from all ranks.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cistron/data/stream.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/quant/recipe.h"
#include "cistron/train/training_step.h"

namespace cistron::train {

struct Layout {
  std::int64_t dp = 1, ep = 1;
  std::int64_t micro_rows = 0;  // what a rank computes at once; 0: all that it has
  bool sharded = false;         // parallel.shard=full

  std::int64_t ranks() const { return dp * ep; }
  std::string Name() const;
};

inline constexpr std::int64_t kRowTokens = 6;

// A run, but for its layout. All of it is drawn from fixed seeds.
struct LayoutCase {
  model::MixtralConfig config;
  DType dtype = DType::kF32;
  model::Recompute recompute = model::Recompute::kNone;
  quant::Recipe recipe = quant::BF16{};
  std::int64_t steps = 10;
  std::int64_t rows = 32;         // of a global batch
  double lr = 0.003;              // of every step
  std::int64_t padding = 0;       // masked tokens at the end of each micro-batch
  std::uint64_t row_order = 0;    // 0: as drawn; else rows of each step are shuffled by this seed
  bool weights_of_first = false;  // only rows of the first half have labels of any weight
  bool one_routing = false;       // every token chooses experts 0 and 1
  bool drift = false;             // rank 1 flips the last bit of a weight after every step (fp32)

  bool narrow_gradients = false;  // of bf16 models: gradients of matrices in bf16
  bool quantized_rows = false;    // parallel.ep_rows=quantized
  bool local_amax = false;        // each rank takes scales from its own rows
  // What stands between a rank and the others; nothing where empty.
  std::function<std::unique_ptr<comm::Communicator>(comm::Communicator&)> wrap;
  bool die_in_save = false;  // rank 1 throws where the others write their parts
  // Where a checkpoint is written after the last step, and one that the run goes on from.
  std::filesystem::path save_to, restore_from;

  // What is moved by how much, each by its own sign, in every step (one rank, f64). Gradients: of
  // matrices, after every micro-batch, as a sum that is rounded there is off.
  double perturb_label_weights = 0, perturb_model_weights = 0, perturb_gradients = 0;
  std::uint64_t perturb_seed = 0;
};

// The config of the table: two layers, four experts, top-2.
model::MixtralConfig TableConfig();

// What a run leaves. Tensors are global: put together from the ranks' boxes.
struct LayoutRun {
  std::vector<StepResult> steps;
  // Of the first step, before clipping; and after the last step: weights, masters and moments under
  // the names of checkpoints, buffers, state of delayed scaling.
  std::map<std::string, Tensor> gradients, state;
  double heldout = 0;
  std::map<std::pair<std::int64_t, int>, double> norms;  // by step and rank
  // Of one rank alone: what the router chose experts by before each step, without jitter, f64
  // [layers · tokens · experts].
  std::vector<Tensor> scores;
  // "rank 3 has other bits of NAME": ranks that hold the same values, and do not.
  std::vector<std::string> differences;
};
LayoutRun TrainLayout(const LayoutCase& c, const Layout& layout);

// Every quantity of a run by name: "loss/3", "gradient/NAME", …; scalars are tensors f64 [1].
std::map<std::string, Tensor> QuantitiesOf(const LayoutRun& run);

// max |a − b| over the elements; NaN where a difference is.
double Distance(const Tensor& a, const Tensor& b);
// max |a|.
double Largest(const Tensor& a);

// Over the tokens, the smallest distance between the score of the last expert chosen and the next.
double SmallestGap(const Tensor& scores, std::int64_t experts, std::int64_t top_k);

}  // namespace cistron::train
