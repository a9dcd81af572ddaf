// Ten steps of configs/L0_sanity.yaml on a GPU and on the CPU give the same losses, gradient norms
// and held-out loss, as near as their arithmetic allows.
//
// The bound. Devices make the same sums in other orders, and what they make of the same numbers in
// bf16 may be rounded to neighbours. The computed sum of n terms is the exact sum of terms that are
// each off by at most ε, with ε = γ_n in the worst case and, with roundings independent and of mean
// zero, by no more than λ√n·u but for a probability of 2·exp(−λ²/2) (Higham and Mary, "A new
// approach to probabilistic rounding error analysis", 2019). λ = 5 is taken, and as n the longest
// sum: a weight's gradient adds up the tokens of a step. In bf16 an activation may be off by 2u
// besides. How far operands that are off by ε move a loss through ten updates is measured on the
// CPU, by runs from initial weights that are each off by ±ε, so that terms of every product of
// every step are. These runs are not scaled: experts that are nearly even, and weights whose
// gradients are noise, go the other way in them as they do between devices. The largest movement of
// a run, over steps and draws of signs, bounds what devices may differ by in any step: in one step
// alone movements cancel by luck. (Signs belong to weights and not to roundings, so that tokens and
// steps of such a run move together, where roundings go each its own way: the bound is wide.)
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/check/bounds.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/testing/cuda.h"
#include "cistron/train/metrics.h"
#include "cistron/train/model_source.h"
#include "cistron/train/trainer.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSteps = 10;
constexpr int kDraws = 3;

// Relative differences, the largest of a run.
struct Differences {
  double loss = 0, norm = 0, aux = 0, heldout = 0;

  void Widen(const Differences& other) {
    loss = std::max(loss, other.loss);
    norm = std::max(norm, other.norm);
    aux = std::max(aux, other.aux);
    heldout = std::max(heldout, other.heldout);
  }
  bool Within(const Differences& bound) const {
    return loss <= bound.loss && norm <= bound.norm && aux <= bound.aux && heldout <= bound.heldout;
  }
  std::string Text() const {
    return fmt::format("loss {:.1e}, norm {:.1e}, auxiliary {:.1e}, held-out {:.1e}", loss, norm,
                       aux, heldout);
  }
};

using Steps = std::vector<StepMetrics>;

Differences Compare(const Steps& got, const Steps& expected) {
  EXPECT_EQ(got.size(), static_cast<std::size_t>(kSteps));
  EXPECT_EQ(got.size(), expected.size());
  const auto relative = [](double a, double b) { return std::abs(a - b) / std::abs(b); };
  Differences d;
  for (std::size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    const StepMetrics &a = got[i], &b = expected[i];
    Differences step{relative(a.loss, b.loss), relative(a.grad_norm, b.grad_norm)};
    for (std::size_t l = 0; l < b.layer_aux_loss.size(); ++l) {
      step.aux = std::max(step.aux, relative(a.layer_aux_loss.at(l), b.layer_aux_loss[l]));
    }
    d.Widen(step);
  }
  d.heldout = relative(got.back().heldout.value().loss, expected.back().heldout.value().loss);
  return d;
}

class DeviceAgreement : public ::testing::TestWithParam<Precision> {
 protected:
  DeviceAgreement() : folder_(Root() / fmt::format("cistron-device-agreement-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~DeviceAgreement() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  std::string PrecisionName() const { return std::string(Name(GetParam())); }

  LoadedConfig Load(const std::string& output, std::vector<std::string> more) const {
    std::vector<std::string> keys = {
        "output=" + (folder_ / output).string(), "data.cache_dir=" + (folder_ / "cache").string(),
        "precision=" + PrecisionName(),
        // The schedule stays that of the whole run.
        fmt::format("train.steps={}", kSteps), "optim.decay_end=1221", "data.train_fraction=0.998",
        "checkpoint.every=0", "checkpoint.at_end=false"};
    keys.insert(keys.end(), more.begin(), more.end());
    const fs::path preset = FindPreset("L0_sanity");
    LoadedConfig loaded = LoadRunConfig(preset, keys);
    ResolveDataPaths(loaded, preset);
    ResolveInit(loaded);
    return loaded;
  }

  Steps Train(const std::string& output, const std::vector<std::string>& more) const {
    const LoadedConfig loaded = Load(output, more);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out{std::tmpfile(), &std::fclose};
    TrainHooks hooks;
    hooks.out = out.get();
    EXPECT_TRUE(train::Train(loaded, hooks).finished);
    return ReadMetrics(RunPaths{folder_ / output}.metrics());
  }

  // From the preset's initial weights, each off by ±ε.
  Steps TrainMoved(const std::string& output, double epsilon, std::uint64_t seed) const {
    const RunConfig config = Load(output, {}).config;
    model::LocalMixtral m(ops::Context(), config.model, DType::kF32);
    m.store.Initialize(config.seed, config.model.initializer_range);
    for (const auto& p : m.store.parameters()) {
      const RandomStream sign(seed, p.spec.name);
      const auto values = p.master.span<float>();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] *= static_cast<float>(1 + (sign.Below(i, 2) == 0 ? epsilon : -epsilon));
      }
    }
    const fs::path weights = SaveWeights(folder_ / (output + "-weights"),
                                         {config.model, "float32", ExportWeights(m.store)});
    return Train(output, {"init.from=" + weights.string()});
  }

  // What devices may take for the same number.
  double Epsilon() const {
    constexpr double kLambda = 5;
    const RunConfig config = Load("none", {}).config;
    const double n = static_cast<double>(config.batch.global_tokens);
    const double sums = kLambda * std::sqrt(n) * check::UnitRoundoff(DType::kF32);
    return GetParam() == Precision::kFp32 ? sums : sums + 2 * check::UnitRoundoff(DType::kBF16);
  }

  Differences Bound(const Steps& cpu) const {
    Differences bound;
    for (int draw = 0; draw < kDraws; ++draw) {
      bound.Widen(Compare(
          TrainMoved(fmt::format("moved{}", draw), Epsilon(), static_cast<std::uint64_t>(draw)),
          cpu));
    }
    std::printf("%s: at most %s\n", PrecisionName().c_str(), bound.Text().c_str());
    return bound;
  }

 private:
  // In memory where there is such a file system: runs sync their files.
  static fs::path Root() {
    const char* memory = "/dev/shm";
    return access(memory, W_OK) == 0 ? fs::path(memory) : fs::temp_directory_path();
  }

  fs::path folder_;
};

TEST_P(DeviceAgreement, TenStepsAsOnTheCpu) {
  if (!testing::HasCuda()) GTEST_SKIP() << "no GPU";
  const Steps cpu = Train("cpu", {});
  const Differences bound = Bound(cpu);
  const Differences gpu = Compare(Train("gpu", {"device=cuda"}), cpu);
  std::printf("%s: GPU beside CPU: %s\n", PrecisionName().c_str(), gpu.Text().c_str());
  EXPECT_TRUE(gpu.Within(bound)) << gpu.Text() << "; at most " << bound.Text();
}

// A bound that a wrong step keeps would prove nothing. Needs no GPU. (Of a tenth of a small
// coefficient, or of weight decay, ten steps of a warm-up show no more than of a token that goes to
// another expert, and of clipping nothing, since Adam undoes it.)
TEST_P(DeviceAgreement, WrongStepsExceedTheBound) {
  const Steps cpu = Train("cpu", {});
  const Differences bound = Bound(cpu);
  const auto expect_beyond = [&](const std::string& what, const Steps& steps) {
    const Differences d = Compare(steps, cpu);
    std::printf("%s: %s: %s\n", PrecisionName().c_str(), what.c_str(), d.Text().c_str());
    EXPECT_FALSE(d.Within(bound)) << what << ": " << d.Text() << "; at most " << bound.Text();
  };
  expect_beyond("weights off by an eighth", TrainMoved("far", 0.125, 7));
  const bool fp32 = GetParam() == Precision::kFp32;
  for (const char* key : {fp32 ? "optim.lr=0.0033" : "optim.beta2=0.9",
                          fp32 ? "model.rms_norm_eps=0.01" : "model.rope_theta=100"}) {
    expect_beyond(key, Train(key, {key}));
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, DeviceAgreement,
                         ::testing::Values(Precision::kFp32, Precision::kBf16),
                         [](const auto& p) { return std::string(Name(p.param)); });

}  // namespace
}  // namespace cistron::train
