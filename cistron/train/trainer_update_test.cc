// What a run makes of its gradients: its updates against AdamW in closed form, and the state of
// delayed scaling.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/data/stream.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/train/tiny_run.h"
#include "cistron/train/training_state.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSteps = 6;

// None has the value of a default, and each matters: the gradients are clipped to the size of eps.
const std::vector<std::string> kUpdateKeys = {"seed=11",
                                              "train.steps=6",
                                              "checkpoint.every=1",
                                              "eval.every=0",
                                              "optim.lr=0.02",
                                              "optim.beta1=0.7",
                                              "optim.beta2=0.8",
                                              "optim.eps=0.001",
                                              "optim.weight_decay=0.3",
                                              "optim.clip=0.05",
                                              "optim.warmup_steps=2",
                                              "optim.floor_ratio=0.25",
                                              "model.router_jitter_noise=0.1"};

std::vector<std::string> With(std::vector<std::string> keys, const std::string& more) {
  if (!more.empty()) keys.push_back(more);
  return keys;
}

// AdamW of one parameter, in fp64, with what its rounding in fp32 may do.
struct ScalarAdamW {
  std::vector<double> m, v, abs_m;  // abs_m: m of the gradients' magnitudes

  // The parameter after update t, into `p`; the rounding error that is allowed, into `bound`.
  void Update(std::span<const float> gradient, double clip, double lr, double decay, std::int64_t t,
              std::vector<double>& p, std::vector<double>& bound) {
    constexpr double kBeta1 = 0.7, kBeta2 = 0.8, kEps = 0.001;
    m.resize(p.size());
    v.resize(p.size());
    abs_m.resize(p.size());
    bound.resize(p.size());
    const double correction1 = 1 - std::pow(kBeta1, t), correction2 = 1 - std::pow(kBeta2, t);
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = clip * static_cast<double>(gradient[i]);
      m[i] = kBeta1 * m[i] + (1 - kBeta1) * g;
      abs_m[i] = kBeta1 * abs_m[i] + (1 - kBeta1) * std::abs(g);
      v[i] = kBeta2 * v[i] + (1 - kBeta2) * g * g;
      const double rate = lr / correction1 / (std::sqrt(v[i] / correction2) + kEps);
      // Fewer than eight roundings of either moment an update, and eight of the parameter.
      bound[i] = check::Gamma(8 * (t + 1), DType::kF32) *
                 (std::abs(p[i]) + rate * (abs_m[i] + std::abs(m[i])));
      p[i] = p[i] * (1 - lr * decay) - rate * m[i];
    }
  }
};

// Gradients of a run's weights on the batches that the run reads, one step after the other.
class GradientReplay {
 public:
  explicit GradientReplay(const RunConfig& config)
      : config_(config),
        model_(ctx_, config.model, DType::kF32),
        stream_(data::Corpus::Open(config.data), config.seed, config.batch.global_tokens) {
    model_.store.Initialize(config.seed, config.model.initializer_range);
  }

  nn::LocalParameterStore& store() { return model_.store; }

  // Leaves the gradients of step `t` in the store; returns their global norm.
  double Step(std::int64_t t) {
    const data::GlobalBatch batch = stream_.Next();
    const model::LossScale scale{Tensor::Scalar(1 / batch.totals.weight_sum),
                                 Tensor::Scalar(1 / static_cast<double>(batch.totals.tokens))};
    model::LossSums sums = model::LossSums::Zeros(ctx_, config_.model);
    store().ZeroGradients();
    model_.model.TrainMicroBatch(batch.MicroBatch(0, static_cast<std::int64_t>(batch.rows.size())),
                                 scale, sums,
                                 {config_.seed, Tensor::FromSpan<std::int64_t>({}, std::array{t})});
    double sum = 0;
    for (const auto& p : store().parameters()) {
      for (const float g : p.grad.span<float>()) sum += double{g} * double{g};
    }
    return std::sqrt(sum);
  }

 private:
  RunConfig config_;
  ops::Context ctx_;
  model::LocalMixtral model_;
  data::TrainingStream stream_;
};

io::CheckpointReader CheckpointOf(const TinyRun& tiny, const std::string& run, std::int64_t step) {
  const auto root = RunPaths{tiny.path(run)}.checkpoints();
  return io::CheckpointReader(root / fmt::format("step-{:08}", step));
}

// Every update of a run: clipping, warm-up and cosine, betas, eps, and who decays.
void UpdatesAreAdamW(const std::string& key, bool norms_decay, bool embeddings_decay) {
  TinyRun tiny("updates");
  const std::vector<std::string> keys = With(kUpdateKeys, key);
  ASSERT_TRUE(tiny.Train("run", keys).finished);
  const auto metrics = tiny.Metrics("run");
  ASSERT_EQ(metrics.size(), static_cast<std::size_t>(kSteps));
  GradientReplay replay(tiny.Load("run", keys).config);
  std::map<std::string, ScalarAdamW> optimizers;
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    SCOPED_TRACE(fmt::format("step {} {}", t, key));
    const double norm = replay.Step(t);
    const double clip = 0.05 / (norm + 1e-6);
    ASSERT_LT(clip, 0.5);  // it clips
    // Warm-up over 2 updates, then a cosine to a quarter of the peak at update 6.
    const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * static_cast<double>(t - 2) / 4));
    const double lr = t <= 2 ? 0.02 * static_cast<double>(t) / 2 : 0.02 * (0.25 + 0.75 * cosine);
    const StepMetrics& line = metrics[static_cast<std::size_t>(t - 1)];
    EXPECT_NEAR(line.lr, lr, 1e-15);
    EXPECT_NEAR(line.grad_norm, norm, 1e-6 * norm);
    const auto checkpoint = CheckpointOf(tiny, "run", t);
    for (auto& parameter : replay.store().parameters()) {
      const std::string& name = parameter.spec.name;
      const bool is_norm = name.find("norm") != std::string::npos;
      const bool is_embedding = name == "model.embed_tokens.weight";
      const bool decays = is_norm ? norms_decay : is_embedding ? embeddings_decay : true;
      const auto before = parameter.master.span<float>();
      std::vector<double> expected(before.begin(), before.end()), bound;
      optimizers[name].Update(parameter.grad.span<float>(), clip, lr, decays ? 0.3 : 0, t, expected,
                              bound);
      const Tensor after = checkpoint.Read("weight/" + name);
      const auto same =
          check::Compare(name, after, Tensor::FromSpan<double>(parameter.spec.shape, expected),
                         [&](std::int64_t i) { return bound[static_cast<std::size_t>(i)]; });
      EXPECT_TRUE(same) << same.message;
      Convert(after, parameter.master);  // each update is judged by itself
    }
    replay.store().MarkChanged();
  }
}
TEST(Updates, AreAdamWThatDecaysMatricesAlone) {
  UpdatesAreAdamW("", false, false);
}
TEST(Updates, DecayEmbeddingsOnRequest) {
  UpdatesAreAdamW("optim.decay_embeddings=true", false, true);
}
TEST(Updates, DecayEverythingOnRequest) {
  UpdatesAreAdamW("optim.decay_all=true", true, true);
}

// Weights and batch are the same: the noise alone tells the steps apart.
TEST(Updates, JitterIsAFunctionOfTheSeed) {
  TinyRun tiny("jitter-seed");
  const RunConfig config = tiny.Load("run", kUpdateKeys).config;
  const auto corpus = data::Corpus::Open(config.data);
  const auto loss = [&](std::uint64_t seed) {
    const ops::Context ctx;
    model::LocalMixtral m(ctx, config.model, DType::kF32);
    m.store.Initialize(3, 0.3);
    optim::AdamWOptimizer optimizer(ctx, m.store, {});
    const data::GlobalBatch batch =
        data::TrainingStream(corpus, 5, config.batch.global_tokens).Next();
    return TrainStep(ctx, m, optimizer, std::array{batch.MicroBatch(0, 4)}, batch.totals, 0.01,
                     seed)
        .loss;
  };
  EXPECT_EQ(loss(1), loss(1));
  EXPECT_NE(loss(1), loss(2));
}

// Each step ends with new scales: after step t they are fmax over the largest amax of the masters
// that the steps so far began with.
TEST(DelayedScaling, StepsMoveTheScalesOfTheWeights) {
  TinyRun tiny("scales");
  const std::vector<std::string> keys = {"precision=fp8_delayed", "train.steps=3",
                                         "checkpoint.every=1"};
  ASSERT_TRUE(tiny.Train("run", keys).finished);
  const RunConfig config = tiny.Load("run", keys).config;
  model::LocalMixtral m(ops::Context(), config.model, DType::kBF16);
  m.store.Initialize(config.seed, config.model.initializer_range);
  std::map<std::string, std::vector<float>> largest;
  for (std::int64_t t = 1; t <= 3; ++t) {
    const auto checkpoint = CheckpointOf(tiny, "run", t);
    std::int64_t found = 0;
    for (auto& p : m.store.parameters()) {
      const std::string key = fmt::format("quant/{}/weight/scale", p.spec.name);
      const std::vector<std::string> names = checkpoint.names();
      if (std::find(names.begin(), names.end(), key) != names.end()) {
        SCOPED_TRACE(key);
        ++found;
        const Tensor scale = checkpoint.Read(key);
        std::vector<float>& amax = largest[key];
        amax.resize(static_cast<std::size_t>(scale.numel()));
        const auto w = p.master.span<float>();
        const std::size_t group = w.size() / amax.size();
        for (std::size_t i = 0; i < w.size(); ++i) {
          amax[i / group] = std::max(amax[i / group], std::abs(w[i]));
        }
        for (std::size_t g = 0; g < amax.size(); ++g) {
          EXPECT_EQ(scale.span<float>()[g], 448 / amax[g]) << g;  // 448: the largest e4m3
        }
      }
      Convert(checkpoint.Read("master/" + p.spec.name), p.master);
    }
    EXPECT_GE(found, 2 * 2);  // of each layer, the experts' two at least
  }
}

// An evaluation reads the scales and leaves nothing: not in the state, not in the weights.
TEST(DelayedScaling, EvalMovesScales) {
  TinyRun tiny("evaluations");
  const std::vector<std::string> keys = {"precision=fp8_delayed", "checkpoint.every=1",
                                         "eval.tokens=0"};
  ASSERT_TRUE(tiny.Train("never", With(keys, "eval.every=0")).finished);
  ASSERT_TRUE(tiny.Train("always", With(keys, "eval.every=1")).finished);
  for (const std::int64_t step : {2, 5, 10}) {
    const auto never = CheckpointOf(tiny, "never", step),
               always = CheckpointOf(tiny, "always", step);
    ASSERT_EQ(always.names(), never.names());
    ASSERT_THAT(never.names(), ::testing::Contains(HasSubstr("/input/amax_history")));
    for (const std::string& name : never.names()) {
      const auto same = check::CompareBitwise(name, always.Read(name), never.Read(name));
      EXPECT_TRUE(same) << same.message;
    }
  }
}

// Without masters the checkpoint holds weights and moments in bf16, and continues bit for bit.
TEST(OptimStates, InBf16AreSaidSavedAndResumed) {
  TinyRun tiny("states");
  for (const std::string micro : {"batch.micro_tokens=0", "batch.micro_tokens=64"}) {
    SCOPED_TRACE(micro);
    const std::vector<std::string> keys = {"precision=bf16", "optim.states=bf16", "train.steps=6",
                                           "run.on_exists=new", micro};
    tiny.Train("whole", keys);
    EXPECT_THAT(tiny.printed(), HasSubstr("no fp32 masters"));
    tiny.Train("parts", keys, /*stop_after=*/4);
    std::vector<std::string> resumed = keys;
    resumed[3] = "run.on_exists=resume";
    tiny.Train("parts", resumed);
    const io::CheckpointReader a = tiny.Newest("whole"), b = tiny.Newest("parts");
    ASSERT_EQ(a.names(), b.names());
    for (const std::string& name : a.names()) {
      EXPECT_FALSE(name.starts_with("master/")) << name;
      const Tensor x = a.Read(name);
      if (name.starts_with("moment")) {
        EXPECT_EQ(x.dtype(), DType::kBF16) << name;
      }
      EXPECT_TRUE(check::CompareBitwise(name, x, b.Read(name)).ok) << name;
    }
  }
  // A run with masters does not continue it in silence.
  try {
    tiny.Train("whole", {"precision=bf16", "train.steps=8", "run.on_exists=resume"});
    FAIL() << "it continued with masters";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr("optim.states"));
  }
  for (const std::string precision : {"fp32", "mxfp8"}) {
    try {
      tiny.Train("refused", {"precision=" + precision, "optim.states=bf16"});
      FAIL() << precision;
    } catch (const Error& error) {
      EXPECT_THAT(error.message(), HasSubstr("optim.states"));
      EXPECT_THAT(error.message(), HasSubstr(precision));
    }
  }
}

// fp32 masters and moments by gradients in bf16: said, repeated and resumed bit for bit, in every
// precision that has bf16 weights.
TEST(OptimGradients, InBf16AreSaidRepeatedAndResumed) {
  TinyRun tiny("gradients");
  for (const std::string precision : {"bf16", "fp8_delayed", "fp8_block"}) {
    for (const std::string micro : {"batch.micro_tokens=0", "batch.micro_tokens=64"}) {
      SCOPED_TRACE(precision + " " + micro);
      const std::vector<std::string> keys = {"precision=" + precision, "optim.gradients=bf16",
                                             "train.steps=6", "run.on_exists=new", micro};
      tiny.Train("whole", keys);
      EXPECT_THAT(tiny.printed(), HasSubstr("fp32 masters"));
      EXPECT_THAT(tiny.printed(), HasSubstr("gradients of matrices in bf16"));
      EXPECT_EQ(tiny.printed().find("rounded at every micro-batch") != std::string::npos,
                micro != "batch.micro_tokens=0");
      tiny.Train("again", keys);
      tiny.Train("parts", keys, /*stop_after=*/4);
      std::vector<std::string> resumed = keys;
      resumed[3] = "run.on_exists=resume";
      tiny.Train("parts", resumed);
      const io::CheckpointReader a = tiny.Newest("whole"), b = tiny.Newest("again"),
                                 c = tiny.Newest("parts");
      ASSERT_THAT(a.names(), ::testing::Contains(HasSubstr("master/")));
      ASSERT_EQ(a.names(), b.names());
      ASSERT_EQ(a.names(), c.names());
      for (const std::string& name : a.names()) {
        const Tensor x = a.Read(name);
        if (name.starts_with("moment")) {
          EXPECT_EQ(x.dtype(), DType::kF32) << name;
        }
        EXPECT_TRUE(check::CompareBitwise(name, x, b.Read(name)).ok) << name;
        EXPECT_TRUE(check::CompareBitwise(name, x, c.Read(name)).ok) << name;
      }
    }
  }
}

// The first moment after one update by unclipped gradients with β1 = 1/2 is half the gradient, and
// that exactly: it tells what the gradient was.
TEST(OptimGradients, InBf16AreThoseOfFp32RoundedOnce) {
  TinyRun tiny("rounded");
  const auto moments = [&](const std::string& output, const std::vector<std::string>& more) {
    std::vector<std::string> keys = {"precision=bf16", "optim.clip=0", "optim.beta1=0.5",
                                     "checkpoint.every=1"};
    keys.insert(keys.end(), more.begin(), more.end());
    tiny.Train(output, keys, /*stop_after=*/1);
    return CheckpointOf(tiny, output, 1);
  };
  const auto wide = moments("wide", {}), narrow = moments("narrow", {"optim.gradients=bf16"});
  const auto several = moments("several", {"optim.gradients=bf16", "batch.micro_tokens=32"});
  std::int64_t differ = 0;
  for (const std::string& name : wide.names()) {
    if (!name.starts_with("moment1/")) continue;
    const Tensor exact = wide.Read(name);
    const bool matrix = exact.shape().rank() >= 2 && name.find("embed_tokens") == name.npos &&
                        name.find("lm_head") == name.npos;
    if (!matrix) {
      EXPECT_TRUE(check::CompareBitwise(name, narrow.Read(name), exact).ok) << name;
      continue;
    }
    const Tensor rounded = ConvertTo(ConvertTo(exact, DType::kBF16), DType::kF32);
    EXPECT_TRUE(check::CompareBitwise(name, narrow.Read(name), rounded).ok) << name;
    if (!check::CompareBitwise(name, rounded, exact).ok) ++differ;
    // Sums over micro-batches are numbers in bf16 too.
    const Tensor sum = several.Read(name);
    EXPECT_TRUE(
        check::CompareBitwise(name, ConvertTo(ConvertTo(sum, DType::kBF16), DType::kF32), sum).ok)
        << name;
  }
  EXPECT_GT(differ, 8);
}

// Gradients are in no checkpoint: a run may go on with another type, and says so. With states in
// bf16 they may be fp32. fp32 models have no other.
TEST(OptimGradients, MayChangeOnTheWayAndAreRefusedInFp32) {
  TinyRun tiny("gradient_keys");
  const std::vector<std::string> keys = {"precision=bf16", "train.steps=4"};
  tiny.Train("run", keys, /*stop_after=*/2);
  EXPECT_THAT(tiny.printed(), Not(HasSubstr("gradients of matrices")));
  const auto fails_with = [&](const std::string& output, const std::vector<std::string>& more) {
    try {
      tiny.Train(output, more);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("it ran");
  };
  EXPECT_THAT(fails_with("run", With(keys, "optim.gradients=bf16")), HasSubstr("optim.gradients"));
  tiny.Train("run",
             {"precision=bf16", "train.steps=4", "optim.gradients=bf16", "run.on_exists=resume"});
  EXPECT_THAT(tiny.printed(), HasSubstr("resuming with changed keys"));
  EXPECT_THAT(tiny.printed(), HasSubstr("gradients of matrices in bf16"));
  for (const std::string gradients : {"fp32", "auto", "bf16"}) {
    tiny.Train("states_" + gradients, {"precision=bf16", "train.steps=2", "optim.states=bf16",
                                       "optim.gradients=" + gradients});
    EXPECT_EQ(tiny.printed().find("gradients of matrices in bf16") == std::string::npos,
              gradients == "fp32");
  }
  EXPECT_THAT(fails_with("refused", {"precision=fp32", "optim.gradients=bf16"}),
              AllOf(HasSubstr("optim.gradients"), HasSubstr("precision=fp32")));
  tiny.Train("fp32", {"precision=fp32", "train.steps=2", "optim.gradients=fp32"});
}

}  // namespace
}  // namespace cistron::train
