// A training loop written by hand: a tiny Mixtral learns a repeated DNA motif.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/data/batch_builder.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"

namespace {

using cistron::Tensor;

constexpr std::int64_t kSequences = 8, kLength = 32;

// Sequences that repeat "ACGGT" from a random phase; one byte is one token.
cistron::data::Batch MakeBatch(std::uint64_t step, cistron::data::BatchTotals& totals) {
  const cistron::RandomStream stream(/*seed=*/1, "phase", step);
  cistron::data::BatchBuilder builder(kSequences * kLength);
  const std::vector<float> weights(kLength, 1.0f);
  for (std::uint64_t s = 0; s < kSequences; ++s) {
    std::vector<std::int64_t> tokens;
    for (std::uint64_t i = 0; i < kLength; ++i) {
      tokens.push_back("ACGGT"[(i + stream.Below(s, 5)) % 5]);
    }
    builder.Append(tokens, weights);
  }
  return builder.Finish(totals);
}

int Run() {
  cistron::model::MixtralConfig config;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_hidden_layers = 2;
  config.num_local_experts = 4;

  const cistron::ops::Context ctx;
  cistron::model::LocalMixtral mixtral(ctx, config, cistron::DType::kF32);
  mixtral.store.Initialize(/*seed=*/1, config.initializer_range);
  cistron::optim::AdamWOptimizer optimizer(ctx, mixtral.store, {});

  double loss = 0;
  for (std::uint64_t step = 0; step < 60; ++step) {
    cistron::data::BatchTotals totals;
    const cistron::data::Batch batch = MakeBatch(step, totals);
    const double tokens = static_cast<double>(totals.tokens);
    auto sums = cistron::model::LossSums::Zeros(ctx, config);
    mixtral.model.TrainMicroBatch(
        batch, {Tensor::Scalar(1 / totals.weight_sum), Tensor::Scalar(1 / tokens)}, sums);
    optimizer.ComputeGradNorm();
    optimizer.Update(/*lr=*/0.01);
    loss = sums.weighted_nll.item() / totals.weight_sum;
    if (step % 10 == 0) std::printf("step %2d: loss %.4f\n", static_cast<int>(step), loss);
  }
  std::printf("last loss %.4f; a uniform guess costs %.4f\n", loss, std::log(256.0));
  return loss < 0.5 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return Run();
  } catch (const cistron::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
