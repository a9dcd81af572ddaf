// The experts of one MoE layer, trained in MXFP8: two grouped linear layers around a SwiGLU that
// the router's probability scales. The fuser makes one op of the three; master weights are fp32 and
// are quantised once an update.
#include <cstdio>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/quant/autocast.h"

using cistron::DType;
using cistron::Shape;
using cistron::Tensor;
namespace nn = cistron::nn;
namespace ops = cistron::ops;
namespace quant = cistron::quant;

namespace {

Tensor Random(const Shape& shape, DType dtype, const char* name, double std) {
  const Tensor t = Tensor::Empty(shape, dtype);
  nn::DrawNormal(/*seed=*/1, name, std, /*begin=*/0, t);
  return t;
}

// dy = (y − target) / rows, the gradient of half the squared error a row, which is returned.
double SquaredError(const Tensor& y, const Tensor& target, const Tensor& dy) {
  const double rows = static_cast<double>(y.dim(0));
  double sum = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const double error = cistron::ElementAsDouble(y, i) - cistron::ElementAsDouble(target, i);
    sum += 0.5 * error * error / rows;
    dy.data<cistron::bf16>()[i] = cistron::bf16(static_cast<float>(error / rows));
  }
  return sum;
}

int Run() {
  constexpr std::int64_t E = 4, H = 64, F = 96, kRows = 41;
  const std::vector<std::int64_t> sizes = {7, 0, 33, 1};  // any counts, no padding
  const Tensor counts = Tensor::FromSpan<std::int64_t>({E}, sizes);
  const Tensor x = Random({kRows, H}, DType::kBF16, "x", 1.0);
  const Tensor probs = Random({kRows}, DType::kF32, "probs", 0.5);
  const Tensor target = Random({kRows, H}, DType::kBF16, "target", 0.1);

  const ops::Context ctx;
  nn::LocalParameterStore store(ctx, DType::kBF16);
  nn::Sequential experts{
      nn::GroupedLinear({.num_groups = E,
                         .in_features = H,
                         .out_features = 2 * F,
                         .name = "gate_up",
                         .store = &store}),
      nn::ScaledSwiGLU(),
      nn::GroupedLinear(
          {.num_groups = E, .in_features = F, .out_features = H, .name = "down", .store = &store})};
  store.Initialize(/*seed=*/1, /*std=*/0.1);
  cistron::optim::AdamWOptimizer optimizer(ctx, store, {});

  const quant::Autocast autocast(quant::MXFP8BlockScaling{});
  std::printf("%s", experts.Explain(ctx, x.dtype()).c_str());

  const Tensor dy = ctx.Empty({kRows, H}, DType::kBF16);
  const Tensor dprobs = ctx.Empty({kRows}, DType::kF32);
  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    nn::Saved saved;
    const Tensor y = experts.Forward(ctx, x, {.split_sizes = counts, .scale = probs}, &saved);
    last = SquaredError(y, target, dy);
    const Tensor dx = experts.Backward(ctx, dy, {.scale = ops::Write(dprobs)}, saved);
    optimizer.ComputeGradNorm();
    optimizer.Update(/*lr=*/0.01);
    if (step == 0) first = last;
  }
  std::printf("squared error a row: %.4f, after 40 updates %.4f\n", first, last);
  return last < 0.5 * first ? 0 : 1;
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
