#include "cistron/train/precision.h"

#include <array>
#include <utility>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

constexpr std::array<std::pair<std::string_view, Precision>, 6> kNames = {
    {{"fp32", Precision::kFp32},
     {"bf16", Precision::kBf16},
     {"fp8_delayed", Precision::kFp8Delayed},
     {"fp8_current", Precision::kFp8Current},
     {"fp8_block", Precision::kFp8Block},
     {"mxfp8", Precision::kMxfp8}}};

void Set(RecipeFormat format, quant::Fp8Format& to) {
  if (format == RecipeFormat::kAuto) return;
  to = format == RecipeFormat::kHybrid ? quant::Fp8Format::kHybrid : quant::Fp8Format::kE4M3;
}

void Set(Switch value, bool& to) {
  if (value != Switch::kAuto) to = value == Switch::kOn;
}

}  // namespace

std::string_view Name(Precision precision) {
  for (const auto& [name, value] : kNames) {
    if (value == precision) return name;
  }
  return "?";
}

Precision ParsePrecision(std::string_view text) {
  std::string known;
  for (const auto& [name, value] : kNames) {
    if (name == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  CISTRON_THROW(kInvalidArgument, "precision {} is not one of {}", text, known);
}

DType ModelDType(Precision precision) {
  return precision == Precision::kFp32 ? DType::kF32 : DType::kBF16;
}

quant::Recipe MakeRecipe(Precision precision, const RecipeOptions& o) {
  switch (precision) {
    case Precision::kFp32:
    case Precision::kBf16: return quant::BF16{};
    case Precision::kFp8Delayed: {
      quant::DelayedScaling r;
      Set(o.format, r.fp8_format);
      r.margin = static_cast<int>(o.margin);
      r.amax_history_len = o.amax_history_len;
      r.amax_compute_algo = o.amax_compute_algo;
      return r;
    }
    case Precision::kFp8Current: {
      quant::Float8CurrentScaling r;
      Set(o.format, r.fp8_format);
      Set(o.power_of_two_scales, r.power_of_two_scales);
      return r;
    }
    case Precision::kFp8Block: {
      quant::Float8BlockScaling r;
      Set(o.format, r.fp8_format);
      Set(o.power_of_two_scales, r.power_of_two_scales);
      Set(o.weights_2d, r.weights_2d);
      return r;
    }
    case Precision::kMxfp8: {
      quant::MXFP8BlockScaling r;
      Set(o.format, r.fp8_format);
      Set(o.weights_2d, r.weights_2d);
      return r;
    }
  }
  return quant::BF16{};
}

RecipeOptions Resolve(Precision precision, const RecipeOptions& options) {
  RecipeOptions resolved = options;
  std::visit(
      [&resolved](const auto& r) {
        const auto on = [](bool value) { return value ? Switch::kOn : Switch::kOff; };
        if constexpr (requires { r.fp8_format; }) {
          resolved.format = r.fp8_format == quant::Fp8Format::kHybrid ? RecipeFormat::kHybrid
                                                                      : RecipeFormat::kE4M3;
        }
        if constexpr (requires { r.power_of_two_scales; }) {
          resolved.power_of_two_scales = on(r.power_of_two_scales);
        }
        if constexpr (requires { r.weights_2d; }) resolved.weights_2d = on(r.weights_2d);
      },
      MakeRecipe(precision, options));
  return resolved;
}

quant::HighPrecisionLayers HighPrecisionLayersOf(const RecipeOptions& o, std::int64_t num_layers) {
  return {o.first_layers_bf16, o.last_layers_bf16, num_layers, o.bf16_patterns};
}

std::vector<std::string> KeysOfOtherRecipes(Precision precision) {
  const bool delayed = precision == Precision::kFp8Delayed;
  const bool current = precision == Precision::kFp8Current;
  const bool block = precision == Precision::kFp8Block;
  const bool mx = precision == Precision::kMxfp8;
  std::vector<std::string> keys;
  const auto add = [&keys](bool has, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (!has) keys.push_back(std::string("recipe.") + name);
    }
  };
  add(delayed || current || block || mx,
      {"format", "first_layers_bf16", "last_layers_bf16", "bf16_patterns"});
  add(delayed, {"margin", "amax_history_len", "amax_compute_algo"});
  add(current || block, {"power_of_two_scales"});
  add(block || mx, {"weights_2d"});
  return keys;
}

}  // namespace cistron::train
