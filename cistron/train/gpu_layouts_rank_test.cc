// What one rank does in gpu_layouts_test.cc: mpirun -np N gpu_layouts_rank_test
//
// N ranks with a GPU each train what one GPU trains: losses, gradient norms and held-out loss for
// every layout of N ranks, within the bound of sums in another order; a checkpoint of one layout
// goes on in another, and ends in the weights that one GPU has.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>

#include "cistron/check/compare.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/model/tiny_mixtral.h"
#include "cistron/parallel/agreement.h"
#include "cistron/parallel/mesh.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/testing/repeated_products.h"
#include "cistron/train/tiny_run.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

comm::Communicator* g_world = nullptr;  // tests of GoogleTest take no arguments

struct Layout {
  std::int64_t dp, ep;
  bool sharded;

  std::vector<std::string> Keys() const {
    return {fmt::format("parallel.dp={}", dp), fmt::format("parallel.ep={}", ep),
            fmt::format("parallel.shard={}", sharded ? "full" : "none")};
  }
  std::string Name() const { return fmt::format("dp{}ep{}{}", dp, ep, sharded ? "sharded" : ""); }
};

// The folder of the first rank, which all ranks use.
class SharedRun {
 public:
  explicit SharedRun(const std::string& name) {
    if (g_world->rank() == 0) tiny_.emplace(name);
  }

  LoadedConfig Load(const std::string& output, const std::vector<std::string>& more) const {
    const std::string lines = parallel::FromFirst(*g_world, [&] {
      std::vector<std::string> keys = {"device=cuda", "model.hidden_size=64",
                                       "model.intermediate_size=40", "model.num_attention_heads=4",
                                       "model.num_key_value_heads=2"};
      keys.insert(keys.end(), more.begin(), more.end());
      return fmt::format("{}", fmt::join(tiny_->Overrides(output, keys), "\n"));
    });
    std::vector<std::string> overrides;
    std::istringstream in(lines);
    for (std::string line; std::getline(in, line);) overrides.push_back(line);
    LoadedConfig loaded = ParseRunConfig("", "", overrides);
    ResolveInit(loaded);
    return loaded;
  }

  // On all ranks together, or on the first alone.
  void Train(const std::string& output, std::optional<Layout> layout,
             std::vector<std::string> more) const {
    if (layout) {
      for (const std::string& key : layout->Keys()) more.push_back(key);
    }
    const LoadedConfig loaded = Load(output, more);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out{std::tmpfile(), &std::fclose};
    TrainHooks hooks;
    hooks.out = out.get();
    if (layout) {
      train::Train(loaded, hooks, g_world);
    } else if (g_world->rank() == 0) {
      train::Train(loaded, hooks);
    }
    g_world->Barrier();
  }

  const TinyRun& tiny() const { return *tiny_; }

 private:
  std::optional<TinyRun> tiny_;  // of the first rank
};

std::vector<Layout> Layouts() {
  const std::int64_t n = g_world->size();
  return {{1, n, false}, {n, 1, false}, {1, n, true}, {n, 1, true}};
}

// Differences relative to the value, the largest of a run. Held-out losses of the steps that have
// one in both: a run that was cut short evaluates at its end.
struct Worst {
  double loss = 0, norm = 0, heldout = 0;
};
Worst Compare(const std::vector<StepMetrics>& got, const std::vector<StepMetrics>& expected) {
  Worst worst;
  EXPECT_EQ(got.size(), expected.size());
  const auto relative = [](double a, double b) { return std::abs(a - b) / std::abs(b); };
  for (std::size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    worst.loss = std::max(worst.loss, relative(got[i].loss, expected[i].loss));
    worst.norm = std::max(worst.norm, relative(got[i].grad_norm, expected[i].grad_norm));
    if (got[i].heldout && expected[i].heldout) {
      worst.heldout =
          std::max(worst.heldout, relative(got[i].heldout->loss, expected[i].heldout->loss));
    }
  }
  return worst;
}

// Layouts add the same terms in another order: an element of a gradient is a sum over 128 tokens,
// and ten updates carry what it differs by. In bf16 each activation may be rounded the other way,
// and a loss or norm, a mean of such values, differ by as much as one of them: 2^-9.
void EveryLayoutTrainsWhatOneGpuTrains(const std::string& precision, double bound) {
  const SharedRun run("gpu-layouts-" + precision);
  const std::vector<std::string> keys = {"precision=" + precision};
  run.Train("one", std::nullopt, keys);
  for (const Layout& layout : Layouts()) {
    run.Train(layout.Name(), layout, keys);
    if (g_world->rank() != 0) continue;
    const Worst worst = Compare(run.tiny().Metrics(layout.Name()), run.tiny().Metrics("one"));
    std::printf("%s %s: loss %.1e, norm %.1e, held-out %.1e of at most %.1e\n", precision.c_str(),
                layout.Name().c_str(), worst.loss, worst.norm, worst.heldout, bound);
    EXPECT_LE(worst.loss, bound) << layout.Name();
    EXPECT_LE(worst.norm, bound) << layout.Name();
    EXPECT_LE(worst.heldout, bound) << layout.Name();
  }
}

TEST(GpuLayouts, EveryLayoutTrainsWhatOneGpuTrainsInFp32) {
  EveryLayoutTrainsWhatOneGpuTrains("fp32", 128 * 0x1p-24);
}
TEST(GpuLayouts, EveryLayoutTrainsWhatOneGpuTrainsInBf16) {
  EveryLayoutTrainsWhatOneGpuTrains("bf16", 0x1p-9);
}

// Whoever counts the rows, the hosts or the GPUs: the same rows in the same places. Products choose
// their tiles by the size of a buffer, which the hosts make exact and the GPUs do not.
TEST(GpuLayouts, RowsCountedByHostsTrainTheSame) {
  const SharedRun run("gpu-ep-sync");
  const Layout layout = Layouts()[0];
  for (const char* sync : {"host", "device"}) {
    run.Train(sync, layout, {"precision=fp32", fmt::format("parallel.ep_sync={}", sync)});
  }
  if (g_world->rank() != 0) return;
  const Worst worst = Compare(run.tiny().Metrics("device"), run.tiny().Metrics("host"));
  std::printf("ep_sync: loss %.1e, norm %.1e\n", worst.loss, worst.norm);
  EXPECT_LE(worst.loss, 128 * 0x1p-24);
  EXPECT_LE(worst.norm, 128 * 0x1p-24);
}

// Buffers for less than an even share: the first step cannot fit. It is made again, and the run is
// that of a rank that has room.
TEST(GpuLayouts, StepsThatDoNotFitAreMadeAgain) {
  const SharedRun run("gpu-overflow");
  const Layout layout = Layouts()[0];
  run.Train("roomy", layout, {"precision=fp32", "parallel.ep_buffer_factor=2"});
  run.Train("tight", layout, {"precision=fp32", "parallel.ep_buffer_factor=0.5"});
  if (g_world->rank() != 0) return;
  const std::vector<StepMetrics> tight = run.tiny().Metrics("tight");
  ASSERT_FALSE(tight.empty());
  EXPECT_GT(tight[0].redone, 0);
  const Worst worst = Compare(tight, run.tiny().Metrics("roomy"));
  std::printf("overflow: %d times in step 1; loss %.1e, norm %.1e\n", tight[0].redone, worst.loss,
              worst.norm);
  EXPECT_LE(worst.loss, 128 * 0x1p-24);
  EXPECT_LE(worst.norm, 128 * 0x1p-24);
}

// Router logits that overflow send all tokens to the same experts, which no rank has room for: that
// is told as what it is, and larger buffers are not tried.
TEST(GpuLayouts, AStepThatDivergesGrowsNoBuffer) {
  const Device device = comm::nccl::DeviceOfRank(*g_world);
  cuda::RequireDevice(device.index);
  const auto world = comm::nccl::Connect(*g_world, device);
  const ops::Context ctx(device);
  model::MixtralConfig config = model::TinyConfig();
  config.hidden_size = 48;
  config.num_local_experts = 2 * world->size();
  config.max_position_embeddings = 32;
  const parallel::Mesh mesh(*world, 1, world->size(), config.num_local_experts);
  model::LocalMixtral m(ctx, config, DType::kF32, true, &mesh,
                        {.expert_exchange = {.why_by_host = "", .buffer_factor = 1}});
  if (m.expert_ranks->peers() == nullptr) {
    GTEST_SKIP() << m.expert_ranks->why_by_host();
  }
  m.store.Initialize(model::kSeed, 0.2);
  const auto& gate = *m.store.Find("model.layers.1.mlp.gate.weight");
  const Tensor huge = Tensor::Empty(gate.value.shape(), DType::kF32);
  for (float& w : huge.span<float>()) w = std::numeric_limits<float>::max();
  CopyTo(huge, gate.value);
  m.store.MarkChanged();
  optim::AdamWOptimizer optimizer(ctx, m.store, {}, m.statistics.get());
  const auto tokens = static_cast<std::uint64_t>(32 * world->rank());
  const std::vector<data::Batch> micro = {model::MakeBatch({20, 12}, config.vocab_size, tokens)};
  const data::BatchTotals totals{.weight_sum = model::WeightSum(micro) * world->size(),
                                 .tokens = model::RoutedTokens(micro) * world->size(),
                                 .rows = 2};
  try {
    TrainStep(ctx, m, optimizer, micro, totals, 1e-3);
    ADD_FAILURE() << "the step was finite";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNumericalFailure);
    EXPECT_NE(error.message().find("the router logits of layer 1 ("), std::string::npos)
        << error.message();
  }
  EXPECT_TRUE(std::isinf(m.expert_ranks->peers()->status().item())) << "it would have fitted";
  EXPECT_EQ(m.expert_ranks->buffer_factor(), 1);
}

TEST(GpuLayouts, TwoRunsOfOneLayoutAgreeBitwise) {
  const SharedRun run("gpu-repeat");
  for (const Layout& layout : {Layouts()[0], Layouts()[3]}) {
    for (const char* name : {"a", "b"}) {
      run.Train(layout.Name() + name, layout, {"precision=bf16"});
    }
    if (g_world->rank() != 0) continue;
    const Worst worst =
        Compare(run.tiny().Metrics(layout.Name() + "a"), run.tiny().Metrics(layout.Name() + "b"));
    EXPECT_EQ(worst.loss, 0) << layout.Name();
    EXPECT_EQ(worst.norm, 0) << layout.Name();
  }
}

TEST(GpuLayouts, ARunResumesUnderAnotherLayout) {
  const SharedRun run("gpu-reshard");
  run.Train("whole", std::nullopt, {});
  const std::vector<Layout> layouts = Layouts();
  const auto until = [](int steps) {
    return std::vector<std::string>{fmt::format("train.steps={}", steps), "optim.decay_end=10",
                                    "run.on_exists=resume"};
  };
  run.Train("moved", layouts[0], {"train.steps=4", "optim.decay_end=10"});
  run.Train("moved", layouts[3], until(7));
  run.Train("moved", std::nullopt, until(10));
  if (g_world->rank() != 0) return;
  const Worst worst = Compare(run.tiny().Metrics("moved"), run.tiny().Metrics("whole"));
  EXPECT_LE(worst.loss, 128 * 0x1p-24);
  EXPECT_LE(worst.norm, 128 * 0x1p-24);
}

// Trap concurrent-corruption: grouped products while NCCL reduces 64 MiB over the same links and
// multiprocessors. Both are checked.
TEST(GpuLayouts, ConcurrentCorruption) {
  constexpr int kRepeats = 1000;
  const Device device = comm::nccl::DeviceOfRank(*g_world);
  cuda::RequireDevice(device.index);
  const auto world = comm::nccl::Connect(*g_world, device);
  const ops::Context ctx(device);
  const testing::RepeatedProducts products(ctx);
  const Tensor t = ctx.Zeros({std::int64_t{16} << 20}, DType::kF32);
  int wrong = 0;
  for (int i = 0; i < kRepeats; ++i) {
    comm::Work work;
    wrong += products.CountWrong([&] { work = world->AllReduceAsync(t, comm::ReduceOp::kMax); },
                                 [&](std::span<const Tensor>) { work.Wait(); });
  }
  EXPECT_EQ(wrong, 0) << "of " << 3 * kRepeats << " products of rank " << world->rank();
  EXPECT_TRUE(check::CompareBitwise("all_reduce", t.ToHost(), Tensor::Zeros(t.shape(), t.dtype())));
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(catch_exceptions, false);  // an exception ends all ranks
  return comm::mpi::RunRank([](comm::Communicator& world) {
    g_world = &world;
    if (world.rank() != 0) {
      delete ::testing::UnitTest::GetInstance()->listeners().Release(
          ::testing::UnitTest::GetInstance()->listeners().default_result_printer());
    }
    return RUN_ALL_TESTS();
  });
}

}  // namespace
}  // namespace cistron::train

int main(int argc, char** argv) {
  return cistron::train::Main(argc, argv);
}
