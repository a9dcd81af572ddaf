// Kernels whose threads share memory, at the widths of training and few rows, from poisoned results
// twice with the same bits (Trap atomics). scripts/test_cuda.sh also runs them under racecheck of
// compute-sanitizer, which looks at every access to shared memory and so needs few rows.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "cistron/check/compare.h"
#include "cistron/nn/grouped_linear.h"
#include "cistron/nn/scaled_swiglu.h"
#include "cistron/nn/sequential.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/ops/norm/norm.h"
#include "cistron/ops/permute/permute.h"
#include "cistron/testing/cuda.h"
#include "cistron/testing/random.h"

namespace cistron {
namespace {

using ops::Write;

class DeviceRaces : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::HasCuda()) GTEST_SKIP() << "no GPU";
  }

  Tensor Draw(const Shape& shape, DType dtype, const char* name) const {
    return ctx_.Place(testing::Normal(shape, dtype, name));
  }
  Tensor Poisoned(const Shape& shape, DType dtype) const {
    const Tensor t = ctx_.Empty(shape, dtype);
    FillPoison(t);
    return t;
  }
  static void ExpectTheSameTwice(const std::function<std::vector<Tensor>()>& run) {
    const std::vector<Tensor> a = run(), b = run();
    for (std::size_t i = 0; i < a.size(); ++i) {
      const auto same = check::CompareBitwise("", a[i].ToHost(), b[i].ToHost());
      EXPECT_TRUE(same) << "result " << i << ": " << same.message;
    }
  }

  const ops::Context ctx_{testing::HasCuda() ? Device{DeviceType::kCuda, 0} : Device{}};
};

// Ragged, empty and one-row groups, of more rows than a tile has.
constexpr std::int64_t kSizes[] = {200, 0, 1, 311}, kRows = 512, kGroups = 4;

TEST_F(DeviceRaces, GroupedProducts) {
  constexpr std::int64_t kIn = 1024, kOut = 1536;
  const Tensor splits = ctx_.Place(Tensor::FromSpan<std::int64_t>({kGroups}, kSizes));
  const Tensor x = Draw({kRows, kIn}, DType::kBF16, "x");
  const Tensor w = Draw({kGroups, kOut, kIn}, DType::kBF16, "w");
  const Tensor dy = Draw({kRows, kOut}, DType::kBF16, "dy");
  ExpectTheSameTwice([&] {
    const Tensor y = Poisoned(dy.shape(), DType::kBF16), dx = Poisoned(x.shape(), DType::kBF16);
    const Tensor dw = Poisoned(w.shape(), DType::kF32);
    ops::GroupedGemmForward(ctx_, {x, splits}, w, Write(y));
    ops::GroupedGemmDgrad(ctx_, {dy, splits}, w, Write(dx));
    ops::GroupedGemmWgrad(ctx_, {dy, splits}, {x, splits}, Write(dw));
    return std::vector{y, dx, dw};
  });
}

// The products with SwiGLU and dSwiGLU in their epilogues.
TEST_F(DeviceRaces, FusedExperts) {
  constexpr std::int64_t kHidden = 1024, kFfn = 512;
  nn::LocalParameterStore store(ctx_, DType::kBF16);
  nn::Sequential layers;
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out) {
    layers.Append(
        std::make_unique<nn::GroupedLinear>(nn::GroupedLinearOptions{.num_groups = kGroups,
                                                                     .in_features = in,
                                                                     .out_features = out,
                                                                     .name = name,
                                                                     .store = &store}));
  };
  linear("fc1", kHidden, 2 * kFfn);
  layers.Append(std::make_unique<nn::ScaledSwiGLU>());
  linear("fc2", kFfn, kHidden);
  store.Initialize(1, 0.1);
  const Tensor splits = ctx_.Place(Tensor::FromSpan<std::int64_t>({kGroups}, kSizes));
  const Tensor x = Draw({kRows, kHidden}, DType::kBF16, "x");
  const Tensor dy = Draw({kRows, kHidden}, DType::kBF16, "dy");
  const Tensor scale = Draw({kRows}, DType::kF32, "scale");
  ExpectTheSameTwice([&] {
    store.ZeroGradients();
    nn::Saved saved;
    const Tensor dscale = Poisoned({kRows}, DType::kF32);
    const Tensor y = layers.Forward(ctx_, x, {.split_sizes = splits, .scale = scale}, &saved);
    const Tensor dx = layers.Backward(ctx_, dy, {.scale = Write(dscale)}, saved);
    std::vector<Tensor> results = {y, dx, dscale};
    for (const auto& p : store.parameters()) results.push_back(p.grad.ToHost());
    return results;
  });
}

// The kernels of this library: steps in bf16 run cuDNN's where it is there.
TEST_F(DeviceRaces, Attention) {
  const ops::Context own = ctx_.WithImpl("attention=flash");
  constexpr std::int64_t kLengths[] = {200, 0, 1, 70}, kTokens = 271;
  const ops::AttentionConfig config{
      .num_heads = 4, .num_kv_heads = 2, .head_dim = 64, .window = 100};
  ops::PackedSequences sequences = ops::PackedFromLengths(kLengths);
  sequences.cu_seqlens = ctx_.Place(sequences.cu_seqlens);
  sequences.positions = ctx_.Place(sequences.positions);
  const Shape heads = {kTokens, 4 * 64}, kv_heads = {kTokens, 2 * 64};
  const Tensor q = Draw(heads, DType::kBF16, "q"), d_o = Draw(heads, DType::kBF16, "do");
  const Tensor k = Draw(kv_heads, DType::kBF16, "k"), v = Draw(kv_heads, DType::kBF16, "v");
  ExpectTheSameTwice([&] {
    const Tensor o = Poisoned(heads, DType::kBF16), lse = Poisoned({4, kTokens}, DType::kF32);
    const Tensor dq = Poisoned(heads, DType::kBF16), dk = Poisoned(kv_heads, DType::kBF16);
    const Tensor dv = Poisoned(kv_heads, DType::kBF16);
    ops::AttentionForward(own, config, sequences, q, k, v, lse, Write(o));
    ops::AttentionBackward(own, config, sequences, d_o, q, k, v, o, lse, Write(dq), Write(dk),
                           Write(dv));
    return std::vector{o, lse, dq, dk, dv};
  });
}

TEST_F(DeviceRaces, RmsNorm) {
  for (const std::int64_t width : {512, 4096}) {
    constexpr std::int64_t kTokens = 300;
    const Shape shape = {kTokens, width};
    const Tensor x = Draw(shape, DType::kBF16, "x"), residual = Draw(shape, DType::kBF16, "r");
    const Tensor g = Draw({width}, DType::kBF16, "g"), dy = Draw(shape, DType::kBF16, "dy");
    const Tensor dh_in = Draw(shape, DType::kBF16, "dh");
    ExpectTheSameTwice([&] {
      const Tensor h = Poisoned(shape, DType::kBF16), y = Poisoned(shape, DType::kBF16);
      const Tensor rstd = Poisoned({kTokens}, DType::kF32), dh = Poisoned(shape, DType::kBF16);
      const Tensor dg = Poisoned({width}, DType::kF32);
      ops::RmsNormForward(ctx_, x, residual, g, 1e-5, h, rstd, Write(y));
      ops::RmsNormBackward(ctx_, dy, h, rstd, g, dh_in, Write(dh), Write(dg));
      return std::vector{h, y, rstd, dh, dg};
    });
  }
}

TEST_F(DeviceRaces, Permute) {
  constexpr std::int64_t kTokens = 700, kTopK = 8, kHidden = 1024, kExperts = 64;
  std::vector<std::int32_t> choice(kTokens * kTopK);
  for (std::size_t i = 0; i < choice.size(); ++i) {
    choice[i] = static_cast<std::int32_t>((i / kTopK * 5 + i % kTopK * 3) % kExperts);
  }
  const Tensor experts = ctx_.Place(
      Tensor::FromSpan<std::int32_t>({kTokens, kTopK}, std::span<const std::int32_t>(choice)));
  const Tensor x = Draw({kTokens, kHidden}, DType::kBF16, "x");
  const Tensor dy = Draw({kTokens, kHidden}, DType::kBF16, "dy");
  const Tensor probs = Draw({kTokens, kTopK}, DType::kF32, "p");
  ExpectTheSameTwice([&] {
    const ops::RowMap map = ops::BuildRowMap(ctx_, experts, kExperts);
    const Shape rows_shape = {kTokens * kTopK, kHidden};
    const Tensor rows = Poisoned(rows_shape, DType::kBF16), y = Poisoned(x.shape(), DType::kBF16);
    const Tensor drows = Poisoned(rows_shape, DType::kBF16);
    const Tensor dprobs = Poisoned(probs.shape(), DType::kF32);
    ops::Permute(ctx_, map, x, Write(rows));
    ops::Unpermute(ctx_, map, rows, probs, Write(y));
    ops::UnpermuteBackward(ctx_, map, dy, rows, probs, Write(drows), Write(dprobs));
    return std::vector{map.split_sizes, map.row_of_slot, map.slot_of_row, rows, y, drows, dprobs};
  });
}

}  // namespace
}  // namespace cistron
