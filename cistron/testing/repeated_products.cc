#include "cistron/testing/repeated_products.h"

#include <array>

#include "cistron/check/compare.h"
#include "cistron/ops/grouped_gemm/grouped_gemm.h"
#include "cistron/testing/random.h"

namespace cistron::testing {
namespace {

constexpr std::array<std::int64_t, 8> kSplits = {300, 0, 37, 660, 0, 24, 1000, 27};
constexpr std::int64_t kRows = 2048, kIn = 256, kOut = 512, kGroups = kSplits.size();

}  // namespace

RepeatedProducts::RepeatedProducts(const ops::Context& ctx) : ctx_(ctx) {
  x_ = ctx.Place(Normal({kRows, kIn}, DType::kBF16, "repeated.x"));
  w_ = ctx.Place(Normal({kGroups, kOut, kIn}, DType::kBF16, "repeated.w"));
  dy_ = ctx.Place(Normal({kRows, kOut}, DType::kBF16, "repeated.dy"));
  splits_ = ctx.Place(Tensor::FromSpan<std::int64_t>({kGroups}, kSplits));
  first_ = Make({}, {});
}

std::vector<Tensor> RepeatedProducts::Make(const std::function<void()>& begin,
                                           const End& end) const {
  const std::vector<Tensor> results = {ctx_.Empty({kRows, kOut}, DType::kBF16),
                                       ctx_.Empty({kRows, kIn}, DType::kBF16),
                                       ctx_.Empty({kGroups, kOut, kIn}, DType::kF32)};
  for (const Tensor& t : results) FillPoison(t);
  if (begin) begin();
  ops::GroupedGemmForward(ctx_, {x_, splits_}, w_, ops::Write(results[0]));
  ops::GroupedGemmDgrad(ctx_, {dy_, splits_}, w_, ops::Write(results[1]));
  ops::GroupedGemmWgrad(ctx_, {dy_, splits_}, {x_, splits_}, ops::Write(results[2]));
  if (end) end(results);
  std::vector<Tensor> on_host;
  on_host.reserve(results.size());
  for (const Tensor& t : results) on_host.push_back(t.ToHost());
  return on_host;
}

int RepeatedProducts::CountWrong(const std::function<void()>& begin, const End& end) const {
  const std::vector<Tensor> got = Make(begin, end);
  int wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!check::CompareBitwise("", got[i], first_[i])) ++wrong;
  }
  return wrong;
}

}  // namespace cistron::testing
