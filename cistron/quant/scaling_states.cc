#include "cistron/quant/scaling_states.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::quant {
namespace {

constexpr std::string_view kScale = "/scale", kHistory = "/amax_history";

bool EndsWith(const std::string& name, std::string_view suffix) {
  return name.size() > suffix.size() &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

}  // namespace

ScalingStates::ScalingStates(ScalingStates&& other) noexcept
    : states_(std::exchange(other.states_, {})) {
  other.version_ = NextVersion();
}

ScalingStates& ScalingStates::operator=(ScalingStates&& other) noexcept {
  states_ = std::exchange(other.states_, {});
  version_ = NextVersion();
  other.version_ = NextVersion();
  return *this;
}

std::uint64_t ScalingStates::NextVersion() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

ScalingStates::State& ScalingStates::Get(const std::string& name, const DelayedScaling& recipe,
                                         DType format, std::int64_t groups, const void* owner) {
  State& s = states_[name];
  CISTRON_CHECK(!s.used || s.format == format,
                "delayed scaling: the state of {} is that of a tensor in {}, and one in {} asks "
                "for it; two layers have one name, or one set of states serves two recipes",
                name, Name(s.format), Name(format));
  CISTRON_CHECK(s.owner == nullptr || owner == nullptr || s.owner == owner,
                "delayed scaling: two layers have tensors named {} and would share one scale; name "
                "the layers apart, or give each model ScalingStates of its own",
                name);
  s.used = true;
  if (owner != nullptr) s.owner = owner;
  s.recipe = recipe;
  s.format = format;
  if (!s.scale) {
    s.scale = Tensor::Empty({groups}, DType::kF32);
    std::fill_n(s.scale.data<float>(), groups, 1.0f);
  }
  if (!s.amax_history)
    s.amax_history = Tensor::Zeros({recipe.amax_history_len, groups}, DType::kF32);
  if (!s.amax) s.amax = Tensor::Zeros({groups}, DType::kF32);
  CISTRON_CHECK(s.scale.shape() == Shape({groups}) &&
                    s.amax_history.shape() == Shape({recipe.amax_history_len, groups}),
                "delayed scaling: the state of {} has scale {} and amax_history {}, but {} groups "
                "and a history of {} are asked for",
                name, Describe(s.scale), Describe(s.amax_history), groups, recipe.amax_history_len);
  return s;
}

void ScalingStates::Record(State& s, const Tensor& amax, std::int64_t first_group) {
  if (!s.recorded) FillZero(s.amax);
  float* const kept = s.amax.data<float>() + first_group;
  const float* const now = amax.data<float>();
  for (std::int64_t g = 0; g < amax.numel(); ++g) {
    if (std::isnan(now[g]) || now[g] > kept[g]) kept[g] = now[g];
  }
  s.recorded = true;
}

// All amax of one kind in one exchange.
void ScalingStates::ReduceAmax(AmaxReducer& ranks) {
  for (const TensorSharing sharing : {TensorSharing::kAll, TensorSharing::kReplicas}) {
    std::vector<float> all;
    const auto for_each = [&](auto&& f) {
      for (auto& [name, s] : states_) {
        const Tensor& amax = s.amax;
        if (s.recorded && s.sharing == sharing) f(amax.span<float>());
      }
    };
    for_each([&](auto amax) { all.insert(all.end(), amax.begin(), amax.end()); });
    if (all.empty()) continue;
    ranks.Max(Tensor::Borrow(all.data(), {static_cast<std::int64_t>(all.size())}, DType::kF32),
              sharing);
    auto from = all.begin();
    for_each([&](auto amax) {
      std::copy_n(from, amax.size(), amax.begin());
      from += static_cast<std::ptrdiff_t>(amax.size());
    });
  }
}

void ScalingStates::EndStep(const ops::Context& ctx, AmaxReducer* ranks) {
  if (ranks != nullptr) ReduceAmax(*ranks);
  for (auto& [name, s] : states_) {
    if (!s.recorded) continue;
    ops::UpdateDelayedScale(ctx, s.amax, s.format, s.recipe.margin, s.recipe.amax_compute_algo,
                            s.amax_history, s.scale);
    s.recorded = false;
    version_ = NextVersion();
  }
}

std::vector<ScalingStates::NamedTensor> ScalingStates::Tensors() const {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, s] : states_) {
    tensors.push_back({name + std::string(kHistory), s.amax_history});
    tensors.push_back({name + std::string(kScale), s.scale});
  }
  return tensors;
}

void ScalingStates::Restore(const std::string& name, const Tensor& tensor) {
  const bool scale = EndsWith(name, kScale);
  CISTRON_CHECK(scale || EndsWith(name, kHistory),
                "delayed scaling: '{}' is neither a scale nor an amax_history", name);
  CISTRON_CHECK(tensor.dtype() == DType::kF32 && tensor.rank() == (scale ? 1 : 2),
                "delayed scaling: {} is {}", name, Describe(tensor));
  State& s = states_[name.substr(0, name.size() - (scale ? kScale : kHistory).size())];
  (scale ? s.scale : s.amax_history) = tensor.Clone();
  version_ = NextVersion();
}

}  // namespace cistron::quant
