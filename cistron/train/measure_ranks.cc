#include "cistron/train/measure_ranks.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "cistron/base/philox.h"
#include "cistron/comm/inproc.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

data::Batch RandomBatch(const StepProblem& s, int rank, std::int64_t micro) {
  const MemoryProblem& p = s.memory;
  const std::int64_t tokens = std::min(p.tokens, s.RankTokens() - micro * p.tokens);
  data::Batch batch;
  batch.tokens = Tensor::Empty({tokens}, DType::kI64);
  batch.labels = Tensor::Empty({tokens}, DType::kI64);
  batch.weights = Tensor::Empty({tokens}, DType::kF32);
  batch.sequences = ops::UniformSequences(tokens / p.length, p.length);
  batch.first_token = (micro * p.Ranks() + rank) * p.tokens;
  const RandomStream stream(0, "measure_ranks", static_cast<std::uint64_t>(batch.first_token));
  for (std::int64_t t = 0; t < tokens; ++t) {
    batch.tokens.data<std::int64_t>()[t] = static_cast<std::int64_t>(stream.Below(
        static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(p.model.vocab_size)));
    batch.labels.data<std::int64_t>()[t] = batch.tokens.data<std::int64_t>()[t];
    batch.weights.data<float>()[t] = 1.0f;
  }
  return batch;
}

}  // namespace

std::int64_t MeasuredRanks::Sent() const {
  return std::accumulate(sent.begin(), sent.end(), std::int64_t{0});
}

MeasuredRanks MeasureRanks(const StepProblem& s, int steps) {
  const MemoryProblem& p = s.memory;
  const auto n = static_cast<std::size_t>(p.Ranks());
  std::vector<std::atomic<std::int64_t>> sent(n * n);
  MeasuredRanks measured{.sent = {}, .peaks = std::vector<std::int64_t>(n)};
  const auto rank_main = [&](comm::Communicator& world) {
    const auto allocator = MakeCachingCpuAllocator();
    {
      const ops::Context ctx = ops::Context().WithAllocator(*allocator);
      const parallel::Mesh mesh(world, p.dp, p.ep, p.model.num_local_experts);
      model::LocalMixtral m(ctx, p.model, ModelDType(p.precision), true, &mesh,
                            {.sharded = p.sharding == Sharding::kFull,
                             .quantized_rows = p.ep_rows == TravellingRows::kQuantized});
      m.model.SetRecompute(p.recompute);
      m.store.SetGradientDType(GradientDType(p.precision, p.states, p.gradients, p.whole_batch));
      m.store.Initialize(0, 0.02);
      optim::AdamWOptimizer optimizer(ctx, m.store, {}, m.statistics.get());
      std::vector<data::Batch> micro;
      for (std::int64_t i = 0; i < s.MicroSteps(); ++i) {
        micro.push_back(RandomBatch(s, world.rank(), i));
      }
      data::BatchTotals totals;
      totals.tokens = s.GlobalTokens();
      totals.weight_sum = static_cast<double>(s.GlobalTokens());
      totals.rows = totals.tokens / p.length;
      quant::ScalingStates scaling;
      const quant::Autocast autocast(MakeRecipe(p.precision, {}), {.states = &scaling});
      for (int step = 0; step < steps; ++step) {
        TrainStep(ctx, m, optimizer, micro, totals, 1e-3);
      }
    }
    measured.peaks[static_cast<std::size_t>(world.rank())] = allocator->Stats().peak_bytes;
  };
  comm::RunRanks(static_cast<int>(n), rank_main, {.checked = false},
                 [&](int from, int to, std::int64_t bytes) {
                   sent[static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to)] += bytes;
                 });
  measured.sent.assign(sent.begin(), sent.end());
  return measured;
}

}  // namespace cistron::train
