#include "cistron/nn/sequence_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/check/bounds.h"
#include "cistron/check/compare.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"
#include "cistron/quant/autocast.h"

namespace cistron::nn {
namespace {

// Decisions taken from bytes, zeros after their end.
class Choices {
 public:
  explicit Choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  std::int64_t Below(std::int64_t n) { return Next() % n; }
  bool Coin() { return Below(2) == 1; }
  bool done() const { return at_ >= bytes_.size(); }

 private:
  std::int64_t Next() { return at_ < bytes_.size() ? bytes_[at_++] : 0; }
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

// Groups of fewer rows than a product is cut at, so that fused and unfused products are the same
// calls; larger ones are the business of grouped_mlp_test.
constexpr std::int64_t kMostRows = 100;

struct OpChoice {
  enum Kind { kLinear, kGrouped, kActivation } kind;
  std::int64_t in = 0, out = 0, parts = 1;
  bool bias = false, scaled_bias = false, delay = false;
};

struct Case {
  DType dtype = DType::kF32;
  quant::Recipe recipe;
  std::vector<std::string> high_precision;
  std::vector<std::int64_t> counts;
  std::int64_t rows = 0, rows_beyond = 0;
  bool scale = false, input_gradient = true, weight_gradients = true;
  int passes = 1;
  std::vector<OpChoice> ops;
  bool Takes(bool OpChoice::*option) const {
    return std::any_of(ops.begin(), ops.end(), [&](const OpChoice& o) { return o.*option; });
  }
  bool HasActivation() const {
    return std::any_of(ops.begin(), ops.end(),
                       [](const OpChoice& o) { return o.kind == OpChoice::kActivation; });
  }
};

OpChoice DrawGrouped(Choices& c, std::int64_t in, std::int64_t out) {
  OpChoice o{OpChoice::kGrouped, in, out};
  o.bias = c.Below(4) == 0;
  o.scaled_bias = o.bias && c.Coin();
  o.delay = c.Below(8) == 0;
  return o;
}

Case Draw(Choices& c) {
  Case t;
  t.dtype = c.Coin() ? DType::kF32 : DType::kBF16;
  const quant::Recipe recipes[] = {quant::BF16{},
                                   quant::MXFP8BlockScaling{},
                                   quant::Float8CurrentScaling{},
                                   quant::Float8BlockScaling{},
                                   quant::DelayedScaling{.amax_history_len = 3},
                                   quant::MXFP8BlockScaling{.weights_2d = true}};
  t.recipe = recipes[c.Below(6)];
  const std::int64_t groups = 1 + c.Below(5);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t few[] = {0, 1, 7, 33};
    t.counts.push_back(c.Coin() ? few[c.Below(4)] : c.Below(kMostRows));
    t.rows += t.counts.back();
  }
  t.rows_beyond = c.Below(4);
  t.scale = c.Coin();
  t.input_gradient = c.Below(4) > 0;
  t.weight_gradients = c.Below(4) > 0;
  t.passes = 1 + static_cast<int>(c.Below(2));
  std::int64_t width = 1 + c.Below(48);
  do {
    const std::int64_t next = 2 * (1 + c.Below(24));
    switch (c.Below(4)) {
      case 0: t.ops.push_back({OpChoice::kLinear, width, next}); break;
      case 1: t.ops.push_back(DrawGrouped(c, width, next)); break;
      default: {  // what fuses, most of the time
        OpChoice first = DrawGrouped(c, width, next);
        first.parts = c.Below(8) == 0 ? 1 : 2;
        t.ops.push_back(first);
        t.ops.push_back({OpChoice::kActivation, next, next / 2});
        t.ops.push_back(DrawGrouped(c, next / 2, 2 * (1 + c.Below(24))));
        if (c.Below(8) == 0) {
          t.high_precision.push_back(fmt::format("op{}", t.ops.size() - 1));
        }
        break;
      }
    }
    width = t.ops.back().out;
    if (width % 2 == 0 && c.Below(8) == 0) {
      t.ops.push_back({OpChoice::kActivation, width, width / 2});
      width /= 2;
    }
  } while (!c.done() && t.ops.size() < 7);
  return t;
}

std::string Describe(const Case& t) {
  std::string text =
      fmt::format("{} {} counts {} + {} rows, scale {}, gradients {}{}, passes {}:", Name(t.dtype),
                  quant::Name(t.recipe), fmt::join(t.counts, ","), t.rows_beyond, t.scale,
                  t.input_gradient ? "x" : "", t.weight_gradients ? "w" : "", t.passes);
  for (const OpChoice& o : t.ops) {
    const char* names[] = {"Linear", "GroupedLinear", "ScaledSwiGLU"};
    text += fmt::format(" {} {}→{}{}{}{}{}", names[o.kind], o.in, o.out, o.bias ? " bias" : "",
                        o.scaled_bias ? " scaled" : "", o.delay ? " delayed" : "",
                        o.parts > 1 ? " parts" : "");
  }
  return text;
}

Tensor Normal(const Shape& shape, DType dtype, const std::string& name, double std) {
  const RandomStream stream(7, name);
  const Tensor t = Tensor::Empty(shape, DType::kF64);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    t.data<double>()[i] = std * stream.Normal(static_cast<std::uint64_t>(i));
  }
  return ConvertTo(t, dtype);
}

// `rows` more rows of NaN.
Tensor Padded(const Tensor& t, std::int64_t rows) {
  Shape shape = t.shape();
  shape[0] += rows;
  const Tensor whole = Tensor::Empty(shape, t.dtype());
  FillPoison(whole);
  Convert(t, whole.Slice(0, 0, t.dim(0)));
  return whole;
}

struct Results {
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::vector<quant::ScalingStates::NamedTensor> states;  // of delayed scaling
};

// One run of a case. Values are drawn in f64 and rounded to the case's dtype, whatever the run's.
Results Run(const Case& t, const ops::Context& ctx, DType dtype, bool quantise, bool fuse) {
  LocalParameterStore store(ops::Context(), dtype);
  Sequential layers;
  for (std::size_t i = 0; i < t.ops.size(); ++i) {
    const OpChoice& o = t.ops[i];
    const std::string name = fmt::format("op{}", i);
    switch (o.kind) {
      case OpChoice::kLinear:
        layers.Append(std::make_unique<Linear>(store, name, o.out, o.in));
        break;
      case OpChoice::kActivation: layers.Append(std::make_unique<ScaledSwiGLU>(name)); break;
      case OpChoice::kGrouped: {
        GroupedLinearOptions options;
        options.num_groups = static_cast<std::int64_t>(t.counts.size());
        options.in_features = o.in;
        options.out_features = o.out;
        options.bias = o.bias;
        options.scaled_bias = o.scaled_bias;
        options.out_parts = o.parts;
        options.delay_weight_gradients = o.delay;
        options.name = name;
        options.bias_name = name + ".bias";
        options.store = &store;
        layers.Append(std::make_unique<GroupedLinear>(options));
      }
    }
  }
  layers.EnableFusion(fuse);
  const auto values = [&](const Shape& shape, DType type, const std::string& name, double std) {
    return ConvertTo(Normal(shape, type, name, std), type == t.dtype ? dtype : ComputeType(dtype));
  };
  for (auto& p : store.parameters()) {
    const double fan = static_cast<double>(p.spec.shape[p.spec.shape.rank() - 1]);
    Convert(values(p.spec.shape, t.dtype, p.spec.name, 1 / std::sqrt(fan)), p.master);
    if (p.value.raw() != p.master.raw()) Convert(p.master, p.value);
  }
  store.MarkChanged();
  const auto padded = [&](const Tensor& v) { return Padded(v, t.rows_beyond); };
  const DType row_type = ComputeType(t.dtype);
  const Tensor x = padded(values({t.rows, t.ops.front().in}, t.dtype, "x", 1));
  const Tensor dy = padded(values({t.rows, t.ops.back().out}, t.dtype, "dy", 1));
  ExtraInputs extra;
  const bool grouped = std::any_of(t.ops.begin(), t.ops.end(),
                                   [](const OpChoice& o) { return o.kind != OpChoice::kLinear; });
  if (grouped) {
    extra.split_sizes =
        Tensor::FromSpan<std::int64_t>({static_cast<std::int64_t>(t.counts.size())}, t.counts);
  }
  if (t.scale && t.HasActivation()) extra.scale = padded(values({t.rows}, row_type, "scale", 1));
  if (t.Takes(&OpChoice::scaled_bias)) {
    extra.bias_scale = padded(values({t.rows}, row_type, "bias_scale", 1));
  }
  quant::ScalingStates states;
  const quant::Autocast scope(
      quantise ? t.recipe : quant::Recipe(quant::BF16{}),
      {.high_precision = {.patterns = t.high_precision}, .states = &states});
  Results r;
  const auto keep = [&](const std::string& name, const Tensor& all) {
    if (all) r.tensors.emplace_back(name, all.Slice(0, 0, t.rows).Clone());
  };
  for (int pass = 0; pass < t.passes; ++pass) {
    Saved saved;
    const Tensor y = layers.Forward(ctx, x, extra, &saved);
    BackwardOutputs out{.input = t.input_gradient, .weights = t.weight_gradients};
    if (extra.scale) out.scale = ops::Write(ctx.Empty(extra.scale.shape(), extra.scale.dtype()));
    if (extra.bias_scale) {
      out.bias_scale = ops::Write(ctx.Empty(extra.bias_scale.shape(), extra.bias_scale.dtype()));
    }
    const Tensor dx = layers.Backward(ctx, dy, out, saved);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (const auto* op = dynamic_cast<const GroupedLinear*>(&layers.op(i))) {
        op->ComputeWeightGradients(ctx);
      }
    }
    states.EndStep(ctx);
    if (pass + 1 < t.passes) continue;
    keep("y", y);
    keep("dx", dx);
    keep("dscale", out.scale.tensor);
    keep("dbias_scale", out.bias_scale.tensor);
  }
  for (const auto& p : store.parameters()) {
    if (p.has_grad) r.tensors.emplace_back(p.spec.name, p.grad);
  }
  r.states = states.Tensors();
  return r;
}

// Largest difference and largest magnitude.
std::pair<double, double> ErrorOf(const Tensor& got, const Tensor& exact) {
  double error = 0, most = 0;
  for (std::int64_t i = 0; i < exact.numel(); ++i) {
    const double e = std::abs(ElementAsDouble(got, i) - ElementAsDouble(exact, i));
    error = e <= error ? error : e;  // NaN stays
    most = std::max(most, std::abs(ElementAsDouble(exact, i)));
  }
  return {error, most};
}

// How the states that a fused run leaves differ from those of an unfused one.
std::string DifferenceOfStates(const Results& fused, const Results& unfused) {
  std::string wrong;
  const auto names = [](const Results& r) {
    std::string text;
    for (const auto& state : r.states) text += " " + state.name;
    return text;
  };
  if (names(fused) != names(unfused)) {
    return fmt::format("states, fused:{}; unfused:{}\n", names(fused), names(unfused));
  }
  for (std::size_t i = 0; i < fused.states.size(); ++i) {
    const auto& [name, got] = fused.states[i];
    const check::Comparison same = check::CompareBitwise(name, got, unfused.states[i].tensor);
    if (!same) wrong += "states, fused and unfused: " + same.message + "\n";
  }
  return wrong;
}

}  // namespace

std::string CheckSequence(std::span<const std::uint8_t> bytes, std::string* description) {
  Choices choices(bytes);
  Case t = Draw(choices);
  if (std::any_of(t.ops.begin(), t.ops.end(),
                  [](const OpChoice& o) { return o.kind == OpChoice::kLinear; })) {
    t.rows_beyond = 0;  // a dense layer reads every row
  }
  if (description != nullptr) *description = Describe(t);
  const ops::Context ctx, ref = ops::Context().WithImpl("ref");
  const Results fused = Run(t, ctx, t.dtype, true, true);
  const Results unfused = Run(t, ctx, t.dtype, true, false);
  const Results reference = Run(t, ref, t.dtype, true, false);
  const Results exact = Run(t, ref, DType::kF64, false, false);
  std::string wrong = DifferenceOfStates(fused, unfused);
  for (std::size_t i = 0; i < fused.tensors.size(); ++i) {
    const auto& [name, got] = fused.tensors[i];
    if (got.numel() == 0) continue;
    const check::Comparison same = check::CompareBitwise(name, got, unfused.tensors[i].second);
    if (!same) wrong += "fused and unfused: " + same.message + "\n";
    // Against f64, no worse than twice the reference at the same precision; of a few elements the
    // reference may be right by chance, so what the roundings of every step may do is allowed too.
    const auto [error, most] = ErrorOf(got, exact.tensors[i].second);
    const double reference_error =
        ErrorOf(reference.tensors[i].second, exact.tensors[i].second).first;
    const bool eight_bits = quant::Quantizes(t.recipe);
    const double unit = check::UnitRoundoff(eight_bits ? DType::kE4M3 : t.dtype);
    std::int64_t terms = t.rows;
    for (const OpChoice& o : t.ops) terms += o.in + o.out;
    const double sums = check::Gamma(terms, ComputeType(t.dtype)) * most;
    const double bound =
        sums + 2 * reference_error + 2 * static_cast<double>(t.ops.size()) * unit * most;
    if (!(error <= bound)) {
      wrong += fmt::format("{}: error {} > {} (reference {}, largest {})\n", name, error, bound,
                           reference_error, most);
    }
  }
  return wrong;
}

}  // namespace cistron::nn
