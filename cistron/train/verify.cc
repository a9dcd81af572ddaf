#include "cistron/train/verify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cistron/train/adamw_error.h"
#include "cistron/train/golden_replay.h"
#include "cistron/train/reference_errors.h"

namespace cistron::train {
namespace {

// Error of an fp32 gradient, of the largest of its tensor: 2^-24 and a few terms. A gradient this
// much smaller than the largest of the model is rounding noise.
constexpr double kNoiseFloor = 1e-6;

double MaxAbs(const Tensor& tensor) {
  const Tensor t = tensor.ToHost();
  double largest = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    largest = std::max(largest, std::abs(ElementAsDouble(t, i)));
  }
  return largest;
}

// max|got − golden|; NaN when any element of `got` is not a number.
double MaxDifference(const Tensor& tensor, const Tensor& golden) {
  const Tensor got = tensor.ToHost();
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

double RelativeTo(double golden, double error) {
  return std::abs(error) / std::max(std::abs(golden), 1e-300);
}

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

struct Measured {
  double error = 0;
  double bound = 0;
};
using Rows = std::map<std::string, Measured>;

// What a low precision is measured against.
struct LowPrecision {
  Rows reference;                 // of the scalar reference against the file
  std::vector<StepErrors> steps;  // of the scalar reference, without cancelling
};

// A value beside the file's. At a low precision its bound is known when the reference has run.
struct Comparison {
  std::string quantity;
  double error = 0;
  double bound = 0;  // of fp32 and fp64
  // Of single numbers, which err at a low precision as the reference does without cancelling.
  double StepErrors::*number = nullptr;
  std::int64_t step = 0;
  double golden = 0;

  double BoundWith(const LowPrecision* low) const {
    if (low == nullptr) return bound;
    if (number == nullptr) return 2 * low->reference.at(quantity).error;
    return bound + RelativeTo(golden, 2 * low->steps[static_cast<std::size_t>(step)].*number);
  }
};

// Keeps of each quantity the pair that uses most of its bound.
void Record(Rows& rows, const std::string& quantity, double error, double bound) {
  const auto [row, first] = rows.try_emplace(quantity, Measured{error, bound});
  Measured& worst = row->second;
  if (!first && !(error * worst.bound <= worst.error * bound)) worst = {error, bound};
}
Rows RowsOf(const std::vector<Comparison>& comparisons, const LowPrecision* low) {
  Rows rows;
  for (const Comparison& c : comparisons) Record(rows, c.quantity, c.error, c.BoundWith(low));
  return rows;
}

class Verifier {
 public:
  Verifier(const ops::Context& ctx, const GoldenFolder& folder, const VerifyPrecision& precision)
      : folder_(folder),
        golden_(folder.tensors),
        replay_(ctx, folder, precision),
        is_low_(precision.is_low()) {}

  // The run makes these choices, of every step; `errors` measures it.
  void Follow(const std::vector<Choices>& choices, ReferenceErrors& errors) {
    choices_ = choices;
    errors_ = &errors;
  }
  void SetRechoose(const Rechoose& rechoose) { rechoose_ = rechoose; }

  void Run() {
    if (is_low_) Choose(0);
    ForwardAndGradients();
    Steps();
  }
  const std::vector<Comparison>& comparisons() const { return comparisons_; }
  // Of every step that ran, at a low precision.
  const std::vector<Choices>& choices() const { return choices_; }
  const std::string& note() const { return note_; }

 private:
  void RecordTensor(const std::string& quantity, double error) {
    comparisons_.push_back({quantity, error, HighPrecisionBound(quantity)});
  }
  void RecordNumber(const std::string& quantity, std::int64_t step, double got, double golden,
                    double StepErrors::*number) {
    comparisons_.push_back({quantity, RelativeTo(golden, got - golden),
                            HighPrecisionBound(quantity), number, step, golden});
  }

  // The experts of a step: those to follow, or the run's own, which `choices` keep.
  void Choose(std::int64_t step) {
    if (errors_ != nullptr) {
      replay_.TakeExperts(choices_[static_cast<std::size_t>(step)]);
      return;
    }
    if (rechoose_) replay_.TakeExperts({});
    const model::Mixtral::Logits logits = replay_.ComputeLogits(step);
    choices_.push_back(logits.experts);
    if (!rechoose_) return;
    rechoose_(step, logits.router_logits, choices_.back());
    replay_.TakeExperts(choices_.back());
  }

  void ForwardAndGradients() {
    const model::Mixtral::Logits logits = replay_.ComputeLogits(0);
    RecordTensor("logits", RelativeError(logits.logits, golden_.Read("logits")));
    for (std::size_t i = 0; i < logits.router_logits.size(); ++i) {
      RecordTensor(
          "router_logits",
          RelativeError(logits.router_logits[i], golden_.Read(fmt::format("router_logits.{}", i))));
    }
    const GoldenReplay::Loss loss = replay_.ForwardBackward(0);
    RecordNumber("loss", 0, loss.total, golden_.Read("loss").item(), &StepErrors::loss);
    if (golden_.Find("aux_loss") != nullptr) {
      RecordNumber("aux_loss", 0, loss.aux, golden_.Read("aux_loss").item(), &StepErrors::aux_loss);
    }
    CompareGradients();
    replay_.ZeroGradients();
  }

  void CompareGradients() {
    double largest = 0;
    for (const auto& p : replay_.parameters()) {
      largest = std::max(largest, MaxAbs(golden_.Read("grad." + p.spec.name)));
    }
    for (const auto& p : replay_.parameters()) {
      const Tensor golden = golden_.Read("grad." + p.spec.name);
      if (MaxAbs(golden) < kNoiseFloor * largest) {
        RecordTensor("grad", MaxDifference(p.grad, golden) / largest);
        noise_.insert(p.spec.name);
      } else {
        RecordTensor("grad", RelativeError(p.grad, golden));
      }
    }
  }

  // Whether rounding noise in the file decides which experts its later steps choose.
  bool NoiseRoutes() const {
    const model::MixtralConfig& config = folder_.hf.config;
    return config.num_experts_per_tok < config.num_local_experts &&
           std::any_of(noise_.begin(), noise_.end(),
                       [](const std::string& name) { return name.ends_with("mlp.gate.weight"); });
  }

  void Steps() {
    const Tensor losses = golden_.Read("train.loss");
    const Tensor norms = golden_.Read("train.grad_norm");
    const bool first_only = NoiseRoutes() && folder_.steps() > 1;
    if (first_only) {
      note_ =
          "the gradient of a router's gate is rounding noise in the golden file, and AdamW moves "
          "the gate by it: routing after the first step is arbitrary, so later steps are not "
          "compared";
    }
    for (std::int64_t step = 0; step < (first_only ? 1 : folder_.steps()); ++step) {
      if (is_low_ && step > 0) Choose(step);
      if (errors_ != nullptr) errors_->BeforePass(replay_, step);
      const GoldenReplay::Loss loss = replay_.ForwardBackward(step);
      RecordNumber("train.loss", step, loss.total, ElementAsDouble(losses, step),
                   &StepErrors::loss);
      const double norm = replay_.ComputeGradNorm();
      RecordNumber("train.grad_norm", step, norm, ElementAsDouble(norms, step),
                   &StepErrors::grad_norm);
      if (!is_low_) TrackWeightErrors(norm);
      if (errors_ != nullptr) errors_->BeforeUpdate(replay_);
      replay_.Update();
    }
    if (!first_only) CompareWeights();
  }

  // What gradients as inexact as the file's make of the weights.
  void TrackWeightErrors(double norm) {
    const auto& parameters = replay_.parameters();
    weight_errors_.resize(parameters.size(), AdamWErrorBound(folder_.optimizer.adamw));
    const double max_norm = folder_.optimizer.max_grad_norm;
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
    double largest = 0;
    for (const auto& p : parameters) largest = std::max(largest, MaxAbs(p.grad));
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool noise = noise_.contains(parameters[i].spec.name);
      const double scale = noise ? largest : MaxAbs(parameters[i].grad);
      weight_errors_[i].Step(parameters[i].grad.ToHost(), clip, kNoiseFloor * scale, noise,
                             folder_.lr);
    }
  }

  void CompareWeights() {
    const auto& parameters = replay_.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = "after." + parameters[i].spec.name;
      if (golden_.Find(name) == nullptr) continue;
      const Tensor golden = golden_.Read(name);
      if (is_low_) {
        if (noise_.contains(parameters[i].spec.name)) continue;
        RecordTensor("after", MaxDifference(parameters[i].master, golden));
        continue;
      }
      CISTRON_CHECK(golden.numel() == parameters[i].master.numel(), "verify: {} against golden {}",
                    Describe(parameters[i].master), Describe(golden));
      const Tensor master = parameters[i].master.ToHost();
      Rows worst;
      for (std::int64_t j = 0; j < golden.numel(); ++j) {
        Record(worst, "after", std::abs(ElementAsDouble(master, j) - ElementAsDouble(golden, j)),
               std::max(HighPrecisionBound("after"), weight_errors_[i][j]));
      }
      for (const auto& [quantity, w] : worst) comparisons_.push_back({quantity, w.error, w.bound});
    }
  }

  const GoldenFolder& folder_;
  const io::SafetensorsFile& golden_;
  GoldenReplay replay_;
  const bool is_low_;
  std::vector<Choices> choices_;  // at a low precision
  ReferenceErrors* errors_ = nullptr;
  Rechoose rechoose_;
  std::set<std::string> noise_;  // parameters whose gradient in the file is rounding noise
  std::vector<AdamWErrorBound> weight_errors_;  // by parameter
  std::string note_;
  std::vector<Comparison> comparisons_;
};

// How many choices differ from those in f64.
std::string RoutingNote(const LowPrecision& low, const std::vector<Choices>& choices) {
  std::int64_t rerouted = 0, all = 0;
  for (const StepErrors& step : low.steps) rerouted += step.rerouted;
  for (const Choices& step : choices) {
    for (const Tensor& experts : step) all += experts.numel();
  }
  if (rerouted == 0) return {};
  return fmt::format(
      "of {} choices of an expert, {} are not those of fp64; each moves its token by a whole "
      "expert, and the reference, which is given the same choices, errs with it",
      all, rerouted);
}

}  // namespace

bool VerifyReport::ok() const {
  return !rows.empty() &&
         std::all_of(rows.begin(), rows.end(), [](const VerifyRow& row) { return row.ok; });
}

VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         const VerifyPrecision& precision) {
  return VerifyModel(ctx, directory, precision, {});
}

VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         const VerifyPrecision& precision, const Rechoose& rechoose) {
  const GoldenFolder folder(directory);
  Verifier verifier(ctx, folder, precision);
  verifier.SetRechoose(rechoose);
  verifier.Run();
  VerifyReport report{directory, {}, verifier.note()};
  Rows rows;
  if (precision.is_low()) {
    const ops::Context reference_ctx = ops::Context().WithImpl("ref");
    ReferenceErrors errors(reference_ctx, folder, verifier.choices());
    Verifier reference(reference_ctx, folder, precision);
    reference.Follow(verifier.choices(), errors);
    reference.Run();
    const LowPrecision low{RowsOf(reference.comparisons(), nullptr), errors.steps()};
    rows = RowsOf(verifier.comparisons(), &low);
    for (const StepErrors& step : low.steps) Record(rows, "choices", step.gap, step.gap_bound);
    const std::string routing = RoutingNote(low, verifier.choices());
    report.note += (report.note.empty() || routing.empty() ? "" : "; ") + routing;
    report.bounds =
        "twice the error that the scalar reference makes in this precision, with the same choices "
        "of experts, against the same golden values; a chosen expert's logit in fp64 below one "
        "that is left: four times the error of the reference's";
  } else {
    rows = RowsOf(verifier.comparisons(), nullptr);
  }
  static constexpr const char* kOrder[] = {"logits",     "router_logits",   "choices",
                                           "loss",       "aux_loss",        "grad",
                                           "train.loss", "train.grad_norm", "after"};
  for (const char* quantity : kOrder) {
    const auto found = rows.find(quantity);
    if (found == rows.end()) continue;
    const auto [error, bound] = found->second;
    report.rows.push_back({quantity, error, bound, error <= bound});
  }
  return report;
}

std::string FormatVerifyReport(const VerifyReport& report) {
  const bool counted = !report.rows.empty() && report.rows.front().compared > 0;
  std::string text =
      fmt::format("{}\n  {:<26} {:>9} {:>9} {:>12} {:>12}\n", report.path.string(), "quantity",
                  counted ? "values" : "", counted ? "compared" : "", "worst error", "bound");
  for (const VerifyRow& row : report.rows) {
    text += fmt::format("  {:<26} {:>9} {:>9} {:>12.3e} {:>12.3e}  {}\n", row.quantity,
                        counted ? fmt::format("{}", row.compared) : "", counted ? row.how : "",
                        row.error, row.bound, row.ok ? "ok" : "FAILED");
  }
  if (!report.bounds.empty()) text += fmt::format("  bound: {}\n", report.bounds);
  if (!report.note.empty()) text += fmt::format("  note: {}\n", report.note);
  return text;
}

}  // namespace cistron::train
