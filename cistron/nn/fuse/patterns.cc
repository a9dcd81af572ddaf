// The ordered lists of patterns.
#include <array>

#include "cistron/nn/fuse/grouped_mlp.h"
#include "cistron/nn/fuse/plan.h"

namespace cistron::nn::fuse {

std::span<const Pattern> JointPatterns() {
  static const std::array kPatterns = {GroupedMlpPattern()};
  return kPatterns;
}

std::span<const Pattern> ForwardPatterns() {
  return {};
}

std::span<const Pattern> BackwardPatterns() {
  return {};
}

}  // namespace cistron::nn::fuse
