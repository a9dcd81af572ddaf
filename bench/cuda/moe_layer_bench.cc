// A whole MoE layer on a GPU, router to combine, in bf16: the layers of docs/benchmarks.md, beside
// peer_moe.py --what layer. One JSON line a case and variant, fields as the peers'.
//
//   moe_layer_bench [--case NAME] [--grad bf16|f32] [--seconds S] [--profile 1] [--once 1]
//   [--by-ops 0]
//
// Variants take turns: as the library runs it, with the experts one op after another, and again.
// A forward pass keeps nothing; "fwdbwd" keeps and frees all of it, gradients of weights are
// allocated inside. `fwdbwd_ms` is the median of single calls, each waited for; `queued_ms` the
// mean of calls that follow each other. TFLOP/s count 6·T·K·H·F and 18·T·K·H·F.
// `--by-ops 0`: as the library runs it alone, once. `--once 1`: two passes and nothing else, for a
// profiler that lists kernels.
#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/nn/moe_layer.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/profile.h"

namespace cistron {
namespace {

struct Case {
  const char* name;
  std::int64_t tokens, hidden, ffn, experts, top_k;
  double flops() const { return 6.0 * double(tokens * top_k) * double(hidden * ffn); }
};
constexpr Case kCases[] = {{"mixtral8x7b_t8192", 8192, 4096, 14336, 8, 2},
                           {"mixtral8x7b_t32768", 32768, 4096, 14336, 8, 2},
                           {"fine128_t16384", 16384, 2048, 768, 128, 8},
                           {"small8_t8192", 8192, 1024, 3584, 8, 2},
                           {"dna32_t16384", 16384, 768, 2688, 32, 2}};

struct Options {
  std::string only;
  DType grad = DType::kBF16;
  double seconds = 0.6;
  bool profile = false, once = false, by_ops = true;
};

// Normal values, a block of them again and again: drawing a billion takes longer than all else.
Tensor Random(const ops::Context& ctx, const Shape& shape, double std, std::uint64_t seed) {
  constexpr std::int64_t kBlock = 1 << 22;
  const Tensor all = ctx.Empty(shape, DType::kBF16);
  const Tensor flat = all.Reshape({all.numel()});
  const std::int64_t block = std::min(kBlock, all.numel());
  const Tensor values = Tensor::Empty({block}, DType::kF32);
  const RandomStream stream(seed, "moe_layer_bench");
#pragma omp parallel for
  for (std::int64_t i = 0; i < block; ++i) {
    values.data<float>()[i] =
        static_cast<float>(std * stream.Normal(static_cast<std::uint64_t>(i)));
  }
  const Tensor on_device = ctx.Place(ConvertTo(values, DType::kBF16));
  for (std::int64_t at = 0; at < all.numel(); at += block) {
    const std::int64_t n = std::min(block, all.numel() - at);
    CopyTo(on_device.Slice(0, 0, n), flat.Slice(0, at, n));
  }
  return all;
}

// Weights on the device without masters; gradients are made where they are first written.
class Store final : public nn::ParameterStore {
 public:
  Store(const ops::Context& ctx, DType grad) : ctx_(ctx), grad_(grad) {}
  nn::ParameterId Register(const nn::ParameterSpec& spec) override {
    specs_.push_back(spec);
    values_.push_back(Random(ctx_, spec.shape, 0.02, specs_.size()));
    grads_.emplace_back();
    return static_cast<nn::ParameterId>(specs_.size()) - 1;
  }
  Tensor RegisterBuffer(const nn::BufferSpec& spec) override {
    return ctx_.Zeros(spec.shape, DType::kF32);
  }
  Tensor Acquire(nn::ParameterId id) override { return values_.at(Index(id)); }
  void Release(nn::ParameterId) override {}
  QuantizedTensor AcquireQuantized(nn::ParameterId, const quant::Recipe&) override {
    CISTRON_THROW(kUnsupported, "moe_layer_bench: bf16 only");
  }
  std::uint64_t version() const override { return 1; }
  const nn::ParameterSpec& spec(nn::ParameterId id) const override { return specs_.at(Index(id)); }
  Shape LocalShape(nn::ParameterId id) const override { return specs_.at(Index(id)).shape; }
  void SetRowParts(nn::ParameterId id, std::int64_t parts) override {
    specs_.at(Index(id)).row_parts = parts;
  }
  ops::Output GradientOutput(nn::ParameterId id) override {
    Tensor& grad = grads_.at(Index(id));
    if (grad) return ops::Accumulate(grad);
    grad = ctx_.Empty(specs_.at(Index(id)).shape, grad_);
    return ops::Write(grad);
  }
  void FreeGradients() {
    for (Tensor& grad : grads_) grad = Tensor();
  }

 private:
  static std::size_t Index(nn::ParameterId id) { return static_cast<std::size_t>(id); }
  ops::Context ctx_;
  DType grad_;
  std::vector<nn::ParameterSpec> specs_;
  std::vector<Tensor> values_, grads_;
};

struct Layer {
  Layer(const Case& c, const ops::Context& ctx, DType grad)
      : store(ctx, grad),
        dispatcher(c.experts),
        moe(store, dispatcher, "mlp.",
            {.hidden = c.hidden,
             .ffn = c.ffn,
             .router = {.num_experts = c.experts, .top_k = c.top_k}}),
        x(Random(ctx, {c.tokens, c.hidden}, 1, 101)),
        dy(Random(ctx, {c.tokens, c.hidden}, 1, 102)) {}

  void Forward(const ops::Context& ctx) const {
    nn::MoeLayer::Routing routing;
    moe.Forward(ctx, x, {}, {}, nn::MoeLayer::Statistics::kNone, {}, routing, nullptr);
  }
  void Both(const ops::Context& ctx) {
    store.FreeGradients();
    nn::Saved saved;
    nn::MoeLayer::Routing routing;
    const Tensor y =
        moe.Forward(ctx, x, {}, {}, nn::MoeLayer::Statistics::kNone, {}, routing, &saved);
    const Tensor dx = moe.Backward(ctx, dy, {}, {}, {}, saved);
  }

  Store store;
  nn::LocalTokenDispatcher dispatcher;
  nn::MoeLayer moe;
  Tensor x, dy;
};

// Median of single calls.
double Called(const ops::Context& ctx, double seconds, const std::function<void()>& f) {
  for (int i = 0; i < 3; ++i) f();
  cuda::Synchronize(ctx.device());
  std::vector<double> times;
  double total = 0;
  while (total < seconds * 1e3 || times.size() < 10) {
    cuda::Event begin(ctx.device()), end(ctx.device());
    begin.Record();
    f();
    end.Record();
    times.push_back(end.MillisecondsSince(begin));
    total += times.back();
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

// Mean of as many calls in a row as fill the time, given that of one.
double Queued(const ops::Context& ctx, double seconds, double one, const std::function<void()>& f) {
  const int calls = std::max(3, static_cast<int>(seconds * 1e3 / one));
  cuda::Event begin(ctx.device()), end(ctx.device());
  begin.Record();
  for (int i = 0; i < calls; ++i) f();
  end.Record();
  return end.MillisecondsSince(begin) / calls;
}

void Run(const Case& c, const ops::Context& ctx, const Options& options) {
  Layer layer(c, ctx, options.grad);
  if (options.once) {
    layer.Both(ctx);
    layer.Both(ctx);
    return cuda::Synchronize(ctx.device());
  }
  const ops::Context by_ops = ctx.WithImpl("grouped_mlp=cuda");
  std::vector<std::pair<const char*, ops::Context>> variants = {{"cistron", ctx}};
  if (options.by_ops) variants.insert(variants.end(), {{"cistron_by_ops", by_ops}, variants[0]});
  for (const auto& [name, on] : variants) {
    const double forward = Called(ctx, options.seconds / 2, [&, on = on] { layer.Forward(on); });
    const std::function<void()> both = [&, on = on] { layer.Both(on); };
    both();
    ctx.allocator().ResetPeak();
    const double called = Called(ctx, options.seconds, both);
    const double queued = Queued(ctx, options.seconds, called, both);
    const double peak = static_cast<double>(ctx.allocator().Stats().peak_bytes) / (1 << 30);
    fmt::print(
        "{{\"case\": \"{}\", \"impl\": \"{}\", \"grad\": \"{}\", \"fwd_ms\": {:.3f}, "
        "\"fwdbwd_ms\": {:.3f}, \"queued_ms\": {:.3f}, \"fwd_tflops\": {:.1f}, "
        "\"fwdbwd_tflops\": {:.1f}, \"peak_gib\": {:.2f}}}\n",
        c.name, name, Name(options.grad), forward, called, queued, c.flops() / forward * 1e-9,
        3 * c.flops() / called * 1e-9, peak);
    std::fflush(stdout);
  }
  if (!options.profile) return;
  for (const auto& [name, on] : {std::pair("cistron", ctx), std::pair("by ops", by_ops)}) {
    constexpr int kCalls = 20;
    train::Profile profile(ctx.device());
    const ops::Context recorded = on.WithRecorder(&profile);
    layer.Both(on);
    profile.Start();
    for (int i = 0; i < kCalls; ++i) layer.Both(recorded);
    profile.End();
    fmt::print("{} {}: {} calls\n{}", c.name, name, kCalls,
               profile.Table(train::MeasureRoofline(ctx, DType::kBF16), kCalls));
  }
}

int Main(const Options& options) {
  const ops::Context ctx(Device{DeviceType::kCuda, 0});
  for (const Case& c : kCases) {
    if (options.only.empty() || options.only == c.name) Run(c, ctx, options);
  }
  return 0;
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  cistron::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--case") options.only = value;
    if (key == "--grad")
      options.grad = value == "f32" ? cistron::DType::kF32 : cistron::DType::kBF16;
    if (key == "--seconds") options.seconds = std::atof(value.c_str());
    if (key == "--profile") options.profile = value == "1";
    if (key == "--by-ops") options.by_ops = value == "1";
    if (key == "--once") options.once = value == "1";
  }
  return cistron::Main(options);
}
