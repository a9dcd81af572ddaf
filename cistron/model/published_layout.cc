#include "cistron/model/published_layout.h"

#include <string_view>

#include "cistron/base/error.h"

namespace cistron::model {

std::vector<FilePart> FileParts(const ParameterInfo& parameter, ExpertLayout layout) {
  constexpr std::string_view kGate = "mlp.gate.weight";
  constexpr std::string_view kGateUp = "mlp.experts.gate_up_proj";
  constexpr std::string_view kDown = "mlp.experts.down_proj";
  const std::string& name = parameter.name;
  const Shape& shape = parameter.shape;
  if (layout == ExpertLayout::kStacked) return {{name, shape, 0}};

  const auto prefix = [&name](std::string_view suffix) {
    return name.substr(0, name.size() - suffix.size()) + "block_sparse_moe.";
  };
  std::vector<FilePart> parts;
  if (name.ends_with(kGate)) {
    parts.push_back({prefix(kGate) + "gate.weight", shape, 0});
  } else if (name.ends_with(kGateUp)) {
    const Shape half = {shape[1] / 2, shape[2]};
    for (std::int64_t e = 0; e < shape[0]; ++e) {
      const std::string expert = prefix(kGateUp) + fmt::format("experts.{}.", e);
      parts.push_back({expert + "w1.weight", half, (2 * e) * half.numel()});
      parts.push_back({expert + "w3.weight", half, (2 * e + 1) * half.numel()});
    }
  } else if (name.ends_with(kDown)) {
    const Shape whole = {shape[1], shape[2]};
    for (std::int64_t e = 0; e < shape[0]; ++e) {
      parts.push_back(
          {prefix(kDown) + fmt::format("experts.{}.w2.weight", e), whole, e * whole.numel()});
    }
  } else {
    parts.push_back({name, shape, 0});
  }
  return parts;
}

}  // namespace cistron::model
