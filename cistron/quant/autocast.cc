#include "cistron/quant/autocast.h"

#include <charconv>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::quant {
namespace {

thread_local const Autocast* current = nullptr;

// Glob with * alone: each piece between stars is found after the one before it.
bool Matches(std::string_view pattern, std::string_view name) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  if (name.substr(0, star) != pattern.substr(0, star)) return false;
  const std::string_view rest = pattern.substr(star + 1);
  for (std::size_t i = star; i <= name.size(); ++i) {
    if (Matches(rest, name.substr(i))) return true;
  }
  return false;
}

// N of "…layers.N.…"; −1 when there is none.
std::int64_t LayerOf(std::string_view name) {
  constexpr std::string_view kMark = "layers.";
  const std::size_t at = name.find(kMark);
  if (at == std::string_view::npos) return -1;
  std::int64_t layer = -1;
  std::from_chars(name.data() + at + kMark.size(), name.data() + name.size(), layer);
  return layer;
}

}  // namespace

bool HighPrecisionLayers::Contains(std::string_view name) const {
  const std::int64_t layer = LayerOf(name);
  if (layer >= 0 && (layer < first || (last > 0 && layer >= num_layers - last))) return true;
  for (const std::string& pattern : patterns) {
    if (Matches(pattern, name)) return true;
  }
  return false;
}

Autocast::Autocast(Recipe recipe, AutocastOptions options)
    : recipe_(recipe), options_(std::move(options)), outer_(current) {
  Validate(recipe_);
  CISTRON_CHECK(!std::holds_alternative<DelayedScaling>(recipe_) || options_.states != nullptr,
                "autocast: DelayedScaling needs AutocastOptions::states, where scales and amax "
                "histories live from step to step");
  const HighPrecisionLayers& high = options_.high_precision;
  CISTRON_CHECK(
      high.first >= 0 && high.last >= 0 && high.num_layers >= 0,
      "autocast: first = {}, last = {} and num_layers = {} of high_precision must be 0 or "
      "more",
      high.first, high.last, high.num_layers);
  CISTRON_CHECK(high.last == 0 || high.num_layers > 0,
                "autocast: the last {} layers cannot be told without num_layers", high.last);
  current = this;
}

Autocast::~Autocast() {
  current = outer_;
}

const Autocast* Autocast::Current() {
  return current;
}

AmaxReducer* AmaxReducerFor(const Recipe& recipe) {
  if (current == nullptr || !std::holds_alternative<Float8CurrentScaling>(recipe)) return nullptr;
  return current->options().amax_reducer;
}

Recipe RecipeFor(std::string_view parameter_name) {
  if (current == nullptr || current->options().high_precision.Contains(parameter_name)) {
    return BF16{};
  }
  return current->recipe();
}

}  // namespace cistron::quant
