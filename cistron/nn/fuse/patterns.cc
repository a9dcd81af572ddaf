// The ordered lists of patterns.
#include <array>

#include "cistron/nn/fuse/grouped_mlp.h"
#include "cistron/nn/fuse/plan.h"
#include "cistron/nn/fuse/swiglu_linear.h"

namespace cistron::nn::fuse {

std::span<const Pattern> JointPatterns() {
  static const std::array kPatterns = {GroupedMlpPattern()};
  return kPatterns;
}

std::span<const Pattern> ForwardPatterns() {
  static const std::array kPatterns = {SwiGluLinearForwardPattern()};
  return kPatterns;
}

std::span<const Pattern> BackwardPatterns() {
  static const std::array kPatterns = {SwiGluLinearBackwardPattern()};
  return kPatterns;
}

}  // namespace cistron::nn::fuse
