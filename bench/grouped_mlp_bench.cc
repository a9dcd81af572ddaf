// The experts of an MoE layer, fused and op by op, and what bounds those ops: JSON lines.
//
//   grouped_mlp_bench [--clock wall|cpu] [--seconds S] [--shape NAME] [--precision NAME]
//
// A line with "op": "grouped_mlp" gives forward, and forward with backward, of the fused op and of
// the ops that it replaces, taking turns (`ratio` is unfused / fused), the bytes that each keeps
// from forward to backward, and the largest number of bytes that each holds at once.
// A line with "op": "unfused" gives what the ops themselves reach: products beside one oneDNN
// product of the summed size, SwiGLU and quantisation beside copies of as many bytes.
#include <fmt/core.h>
#include <oneapi/dnnl/dnnl.h>

#include <memory>
#include <string_view>

#include "bench/alternate.h"
#include "bench/bytes.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"
#include "cistron/ops/activation/activation.h"
#include "cistron/ops/gemm/gemm.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/instruction_set.h"
#include "cistron/quant/autocast.h"
#include "cistron/quant/quantizer.h"

namespace cistron {
namespace {

using bench::Alternate;
using bench::Random;
using ops::Context;
using ops::Transpose;
using ops::Write;

struct ExpertShape {
  const char* name;
  std::int64_t hidden, ffn, experts, rows;  // rows: tokens · top-k
};
constexpr ExpertShape kShapes[] = {{"L0", 128, 256, 8, 4096},
                                   {"small", 192, 384, 8, 8192},
                                   {"wide", 256, 768, 8, 4096},
                                   {"fine", 256, 128, 32, 8192}};

struct PrecisionCase {
  const char* name;
  DType dtype;
  quant::Recipe recipe;
};
const PrecisionCase kPrecisions[] = {{"fp32", DType::kF32, quant::BF16{}},
                                     {"bf16", DType::kBF16, quant::BF16{}},
                                     {"mxfp8", DType::kBF16, quant::MXFP8BlockScaling{}},
                                     {"mxfp8", DType::kF32, quant::MXFP8BlockScaling{}},
                                     {"fp8_current", DType::kBF16, quant::Float8CurrentScaling{}},
                                     {"fp8_block", DType::kBF16, quant::Float8BlockScaling{}}};

// Group sizes proportional to 1, 2, 3, 4, 1, 2, …
Tensor UnevenSplit(std::int64_t groups, std::int64_t rows) {
  const Tensor splits = Tensor::Zeros({groups}, DType::kI64);
  std::int64_t weights = 0, left = rows;
  for (std::int64_t e = 0; e < groups; ++e) weights += e % 4 + 1;
  for (std::int64_t e = 0; e < groups; ++e) {
    splits.data<std::int64_t>()[e] = e + 1 == groups ? left : rows * (e % 4 + 1) / weights;
    left -= splits.data<std::int64_t>()[e];
  }
  return splits;
}

// One layer's experts with weights of their own.
class Experts {
 public:
  Experts(const ExpertShape& s, DType dtype, bool fuse)
      : store_(Context(), dtype), allocator_(MakeCachingCpuAllocator()) {
    layers_.Append(
        std::make_unique<nn::GroupedLinear>(nn::GroupedLinearOptions{.num_groups = s.experts,
                                                                     .in_features = s.hidden,
                                                                     .out_features = 2 * s.ffn,
                                                                     .out_parts = 2,
                                                                     .name = "gate_up",
                                                                     .store = &store_}));
    layers_.Append(std::make_unique<nn::ScaledSwiGLU>());
    layers_.Append(
        std::make_unique<nn::GroupedLinear>(nn::GroupedLinearOptions{.num_groups = s.experts,
                                                                     .in_features = s.ffn,
                                                                     .out_features = s.hidden,
                                                                     .name = "down",
                                                                     .store = &store_}));
    layers_.EnableFusion(fuse);
    store_.Initialize(7, 0.02);
  }

  Context context() const { return Context().WithAllocator(*allocator_); }

  void Forward(const Tensor& x, const nn::ExtraInputs& extra) {
    nn::Saved saved;
    layers_.Forward(context(), x, extra, &saved);
    saved_bytes = saved.bytes();
  }
  void Train(const Tensor& x, const nn::ExtraInputs& extra, const Tensor& dy,
             const Tensor& dscale) {
    nn::Saved saved;
    layers_.Forward(context(), x, extra, &saved);
    layers_.Backward(context(), dy, {.scale = Write(dscale)}, saved);
    store_.ZeroGradients();
  }
  std::int64_t PeakBytes(const std::function<void()>& pass) {
    allocator_->ResetPeak();
    pass();
    return allocator_->Stats().peak_bytes;
  }

  std::int64_t saved_bytes = 0;

 private:
  nn::LocalParameterStore store_;
  std::unique_ptr<Allocator> allocator_;
  nn::Sequential layers_;
};

void BenchExperts(const bench::Options& options, const ExpertShape& s, const PrecisionCase& p) {
  const quant::Autocast autocast(p.recipe);
  const Tensor x = Random({s.rows, s.hidden}, p.dtype, 1);
  const Tensor dy = Random({s.rows, s.hidden}, p.dtype, 2);
  const Tensor dscale = Tensor::Empty({s.rows}, DType::kF32);
  const nn::ExtraInputs extra{.split_sizes = UnevenSplit(s.experts, s.rows),
                              .scale = Random({s.rows}, DType::kF32, 3)};
  Experts fused(s, p.dtype, true), unfused(s, p.dtype, false);
  const std::vector<double> t =
      Alternate(options, {[&] { fused.Forward(x, extra); }, [&] { unfused.Forward(x, extra); },
                          [&] { fused.Train(x, extra, dy, dscale); },
                          [&] { unfused.Train(x, extra, dy, dscale); }});
  const std::int64_t fused_peak = fused.PeakBytes([&] { fused.Train(x, extra, dy, dscale); });
  const std::int64_t unfused_peak = unfused.PeakBytes([&] { unfused.Train(x, extra, dy, dscale); });
  fmt::print(
      "{{\"op\": \"grouped_mlp\", \"shape\": \"{}\", \"precision\": \"{}\", \"dtype\": \"{}\", "
      "\"isa\": \"{}\", \"threads\": {}, \"forward_ms\": {:.3f}, \"unfused_forward_ms\": {:.3f}, "
      "\"forward_ratio\": {:.3f}, \"train_ms\": {:.3f}, \"unfused_train_ms\": {:.3f}, "
      "\"train_ratio\": {:.3f}, \"saved_bytes\": {}, \"unfused_saved_bytes\": {}, "
      "\"peak_bytes\": {}, \"unfused_peak_bytes\": {}}}\n",
      s.name, p.name, Name(p.dtype), ops::InstructionSetInUse(), NumThreads(), t[0] * 1e3,
      t[1] * 1e3, t[1] / t[0], t[2] * 1e3, t[3] * 1e3, t[3] / t[2], fused.saved_bytes,
      unfused.saved_bytes, fused_peak, unfused_peak);
  std::fflush(stdout);
}

// One product of the summed size; bf16 by our gemm on oneDNN.
void OneProduct(const Tensor& a, const Tensor& w, const Tensor& c) {
  if (a.dtype() != DType::kF32) {
    return Gemm(Context(), a, Transpose::kNo, w, Transpose::kYes, Write(c));
  }
  dnnl_sgemm('N', 'T', c.dim(0), c.dim(1), a.dim(1), 1.0f, a.data<float>(), a.stride(0),
             w.data<float>(), w.stride(0), 0.0f, c.data<float>(), c.stride(0));
}

void PrintUnfused(const char* op, const ExpertShape& s, const PrecisionCase& p, double seconds,
                  const char* yardstick, double yardstick_seconds) {
  fmt::print(
      "{{\"op\": \"unfused\", \"part\": \"{}\", \"shape\": \"{}\", \"precision\": \"{}\", "
      "\"dtype\": \"{}\", \"ms\": {:.3f}, \"beside\": \"{}\", \"beside_ms\": {:.3f}, \"ratio\": "
      "{:.3f}}}\n",
      op, s.name, p.name, Name(p.dtype), seconds * 1e3, yardstick, yardstick_seconds * 1e3,
      yardstick_seconds / seconds);
  std::fflush(stdout);
}

void BenchParts(const bench::Options& options, const ExpertShape& s, const PrecisionCase& p) {
  const Context ctx;
  const Tensor splits = UnevenSplit(s.experts, s.rows);
  const Tensor x = Random({s.rows, s.hidden}, p.dtype, 1);
  const Tensor pre = Random({s.rows, 2 * s.ffn}, p.dtype, 2);
  const Tensor scale = Random({s.rows}, DType::kF32, 3);
  const Tensor act = Random({s.rows, s.ffn}, p.dtype, 5);
  const Tensor w = Random({s.experts, 2 * s.ffn, s.hidden}, p.dtype, 4);
  if (!quant::Quantizes(p.recipe)) {
    const std::vector<double> t =
        Alternate(options, {[&] {
                              GroupedGemmForward(ctx, {x, splits}, w, Write(pre));
                            },
                            [&] { OneProduct(x, w.Select(0), pre); }});
    PrintUnfused("fc1 forward", s, p, t[0], "one product", t[1]);
    const bench::Copies copies = bench::CopiesOf(pre.bytes() + act.bytes());
    const std::vector<double> u =
        Alternate(options, {[&] { SwiGluForward(ctx, pre, scale, splits, Write(act)); },
                            copies.memcpy, copies.vector});
    PrintUnfused("swiglu forward", s, p, u[0], "memcpy", u[1]);
    PrintUnfused("swiglu forward", s, p, u[0], "vector copy", u[2]);
    return;
  }
  const quant::QuantizeRequest request{.x = act, .split_sizes = splits};
  const std::int64_t bytes = act.bytes() + QuantizeOperand(ctx, p.recipe, request).bytes();
  const bench::Copies copies = bench::CopiesOf(bytes);
  const std::vector<double> t = Alternate(
      options, {[&] { QuantizeOperand(ctx, p.recipe, request); }, copies.memcpy, copies.vector});
  PrintUnfused("quantize", s, p, t[0], "memcpy", t[1]);
  PrintUnfused("quantize", s, p, t[0], "vector copy", t[2]);
}

// The value of --name; empty when it is not given.
std::string_view Value(int argc, char** argv, std::string_view name) {
  for (int i = 1; i + 1 < argc; i += 2) {
    if (argv[i] == name) return argv[i + 1];
  }
  return {};
}

void Run(int argc, char** argv) {
  const bench::Options options = bench::ParseOptions(argc, argv);
  const std::string_view shape = Value(argc, argv, "--shape");
  const std::string_view precision = Value(argc, argv, "--precision");
  for (const ExpertShape& s : kShapes) {
    for (const PrecisionCase& p : kPrecisions) {
      if ((!shape.empty() && shape != s.name) || (!precision.empty() && precision != p.name)) {
        continue;
      }
      BenchExperts(options, s, p);
      BenchParts(options, s, p);
    }
  }
}

}  // namespace
}  // namespace cistron

int main(int argc, char** argv) {
  return cistron::bench::Main([&] { cistron::Run(argc, argv); });
}
