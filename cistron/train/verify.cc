#include "cistron/train/verify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "cistron/io/file.h"
#include "cistron/io/safetensors.h"
#include "cistron/model/hugging_face.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"

namespace cistron::train {
namespace {

struct Hyperparameters {
  double lr;
  optim::AdamWOptions optimizer;
};

Hyperparameters ReadHyperparameters(const std::filesystem::path& path) {
  const std::string text = io::ReadFile(path);
  try {
    const nlohmann::json about = nlohmann::json::parse(text);
    Hyperparameters h{about.at("lr"), {}};
    h.optimizer.adamw.beta1 = about.at("betas").at(0);
    h.optimizer.adamw.beta2 = about.at("betas").at(1);
    h.optimizer.adamw.eps = about.at("eps");
    h.optimizer.adamw.weight_decay = about.at("weight_decay");
    h.optimizer.max_grad_norm = about.at("clip");
    h.optimizer.decay_all = true;  // torch.optim.AdamW over one group of all parameters
    return h;
  } catch (const nlohmann::json::exception& e) {
    CISTRON_THROW(kBadInput, "verify: '{}' is not a description of golden values: {}",
                  path.string(), e.what());
  }
}

// Batch of HF's causal language modelling: labels are the inputs, shifted by one.
data::Batch MakeBatch(const Tensor& input_ids, std::int64_t step) {
  const std::int64_t batch = input_ids.dim(1);
  const std::int64_t length = input_ids.dim(2);
  data::Batch b;
  b.tokens = ConvertTo(input_ids.Select(step).Reshape({batch * length}), DType::kI64);
  b.labels = Tensor::Empty({batch * length}, DType::kI64);
  b.weights = Tensor::Empty({batch * length}, DType::kF32);
  b.sequences = ops::UniformSequences(batch, length);
  const auto tokens = b.tokens.span<std::int64_t>();
  const auto labels = b.labels.span<std::int64_t>();
  const auto weights = b.weights.span<float>();
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const bool last = (t + 1) % static_cast<std::size_t>(length) == 0;
    labels[t] = last ? -100 : tokens[t + 1];
    weights[t] = last ? 0.0f : 1.0f;
  }
  return b;
}

// A gradient this much smaller than the largest of the model is fp32 rounding noise (2^-24 and a
// few terms).
constexpr double kNoiseFloor = 1e-6;

// Largest error of each quantity, by the measure of its kind.
using Errors = std::map<std::string, double>;

double MaxAbs(const Tensor& t) {
  double largest = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    largest = std::max(largest, std::abs(ElementAsDouble(t, i)));
  }
  return largest;
}

// max|got − golden|; NaN when any element of `got` is not a number.
double MaxDifference(const Tensor& got, const Tensor& golden) {
  CISTRON_CHECK(got.numel() == golden.numel(), "verify: {} against golden {}", Describe(got),
                Describe(golden));
  double largest = 0;
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const double d = std::abs(ElementAsDouble(got, i) - ElementAsDouble(golden, i));
    if (!(d <= largest)) largest = d;
    if (std::isnan(d)) return d;
  }
  return largest;
}

double RelativeError(const Tensor& got, const Tensor& golden) {
  return MaxDifference(got, golden) / std::max(MaxAbs(golden), 1e-300);
}

double RelativeError(double got, double golden) {
  return std::abs(got - golden) / std::max(std::abs(golden), 1e-300);
}

class GoldenRun {
 public:
  GoldenRun(const ops::Context& ctx, const std::filesystem::path& directory, DType precision)
      : ctx_(ctx),
        hf_(model::LoadHuggingFace(directory)),
        golden_(directory / "golden.safetensors"),
        about_(ReadHyperparameters(directory / "about.json")),
        local_(ctx, hf_.config, precision) {
    for (const io::NamedTensor& t : hf_.tensors) local_.store.Assign(t.name, t.tensor);
  }

  Errors Run() {
    input_ids_ = golden_.Read("input_ids");
    CISTRON_CHECK(input_ids_.rank() == 3, "verify: input_ids is {}, expected [steps, batch, seq]",
                  Describe(input_ids_));
    ForwardAndGradients();
    Steps();
    return errors_;
  }

 private:
  void Record(const std::string& quantity, double error) {
    double& worst = errors_.try_emplace(quantity, 0.0).first->second;
    if (!(error <= worst)) worst = error;
  }

  // Loss of one batch with the auxiliary term; gradients go to the store.
  struct Loss {
    double total, aux;
  };
  Loss ForwardBackward(const data::Batch& batch) {
    double weight_sum = 0;
    for (const float w : batch.weights.span<float>()) weight_sum += w;
    const model::LossScale scale{Tensor::Scalar(1 / weight_sum),
                                 Tensor::Scalar(1 / static_cast<double>(batch.num_tokens()))};
    model::LossSums sums = model::LossSums::Zeros(ctx_, hf_.config);
    local_.model.TrainMicroBatch(batch, scale, sums);
    const double aux = sums.aux_loss.item();
    const double coefficient =
        hf_.config.output_router_logits ? hf_.config.router_aux_loss_coef : 0;
    return {sums.weighted_nll.item() / weight_sum + coefficient * aux, aux};
  }

  void ForwardAndGradients() {
    const data::Batch batch = MakeBatch(input_ids_, 0);
    const model::Mixtral::Logits logits = local_.model.ComputeLogits(batch);
    Record("logits", RelativeError(logits.logits, golden_.Read("logits")));
    for (std::size_t i = 0; i < logits.router_logits.size(); ++i) {
      Record("router_logits", RelativeError(logits.router_logits[i],
                                            golden_.Read(fmt::format("router_logits.{}", i))));
    }
    const Loss loss = ForwardBackward(batch);
    Record("loss", RelativeError(loss.total, golden_.Read("loss").item()));
    if (golden_.Find("aux_loss") != nullptr) {
      Record("aux_loss", RelativeError(loss.aux, golden_.Read("aux_loss").item()));
    }
    CompareGradients();
    local_.store.ZeroGradients();
  }

  // A parameter whose gradient is zero in exact arithmetic (keys and queries under a window of one,
  // the gate of a top-1 router without auxiliary loss) holds rounding noise in the golden file and
  // here. Its gradient is measured against the largest of all, and its weights after the steps,
  // where Adam scales noise up to full steps, are left out.
  void CompareGradients() {
    double largest = 0;
    for (const auto& p : local_.store.parameters()) {
      largest = std::max(largest, MaxAbs(golden_.Read("grad." + p.spec.name)));
    }
    for (const auto& p : local_.store.parameters()) {
      const Tensor golden = golden_.Read("grad." + p.spec.name);
      if (MaxAbs(golden) < kNoiseFloor * largest) {
        Record("grad", MaxDifference(p.grad, golden) / largest);
        without_gradient_.insert(p.spec.name);
      } else {
        Record("grad", RelativeError(p.grad, golden));
      }
    }
  }

  void Steps() {
    const Tensor losses = golden_.Read("train.loss");
    const Tensor norms = golden_.Read("train.grad_norm");
    optim::AdamWOptimizer optimizer(ctx_, local_.store, about_.optimizer);
    for (std::int64_t step = 0; step < input_ids_.dim(0); ++step) {
      const Loss loss = ForwardBackward(MakeBatch(input_ids_, step));
      Record("train.loss", RelativeError(loss.total, ElementAsDouble(losses, step)));
      const double norm = optimizer.ComputeGradNorm();
      Record("train.grad_norm", RelativeError(norm, ElementAsDouble(norms, step)));
      optimizer.Update(about_.lr);
    }
    for (const auto& p : local_.store.parameters()) {
      const std::string name = "after." + p.spec.name;
      if (golden_.Find(name) == nullptr || without_gradient_.contains(p.spec.name)) continue;
      Record("after", MaxDifference(p.master, golden_.Read(name)));
    }
  }

  ops::Context ctx_;
  model::HuggingFaceModel hf_;
  io::SafetensorsFile golden_;
  Hyperparameters about_;
  model::LocalMixtral local_;
  Tensor input_ids_;
  std::set<std::string> without_gradient_;
  Errors errors_;
};

double HighPrecisionBound(const std::string& quantity) {
  static const std::map<std::string, double> bounds = {{"logits", 1e-5},
                                                       {"router_logits", 1e-5},
                                                       {"grad", 1e-5},
                                                       {"loss", 1e-6},
                                                       {"aux_loss", 1e-6},
                                                       {"train.loss", 1e-5},
                                                       {"train.grad_norm", 1e-4},
                                                       {"after", 1e-4}};
  return bounds.at(quantity);
}

}  // namespace

bool VerifyReport::ok() const {
  return !rows.empty() &&
         std::all_of(rows.begin(), rows.end(), [](const VerifyRow& row) { return row.ok; });
}

VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         DType precision) {
  const Errors errors = GoldenRun(ctx, directory, precision).Run();
  std::optional<Errors> reference;
  if (precision == DType::kBF16) {
    reference = GoldenRun(ctx.WithImpl("ref"), directory, precision).Run();
  }
  VerifyReport report{directory, {}};
  static constexpr const char* kOrder[] = {"logits",          "router_logits", "loss",
                                           "aux_loss",        "grad",          "train.loss",
                                           "train.grad_norm", "after"};
  for (const char* quantity : kOrder) {
    const auto found = errors.find(quantity);
    if (found == errors.end()) continue;
    const double bound = reference ? 2 * reference->at(quantity) : HighPrecisionBound(quantity);
    report.rows.push_back({quantity, found->second, bound, found->second <= bound});
  }
  return report;
}

std::string FormatVerifyReport(const VerifyReport& report) {
  std::string text = fmt::format("{}\n  {:<18} {:>12} {:>12}\n", report.path.string(), "quantity",
                                 "worst error", "bound");
  for (const VerifyRow& row : report.rows) {
    text += fmt::format("  {:<18} {:>12.3e} {:>12.3e}  {}\n", row.quantity, row.error, row.bound,
                        row.ok ? "ok" : "FAILED");
  }
  return text;
}

}  // namespace cistron::train
