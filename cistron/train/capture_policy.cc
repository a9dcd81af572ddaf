#include "cistron/train/capture_policy.h"

namespace cistron::train {

CapturePolicy::Action CapturePolicy::Next(const std::vector<std::int64_t>& layout, bool has_graph) {
  if (layout != layout_) {
    layout_ = layout;
    ++changes_;
    return Action::kQueue;
  }
  changes_ = 0;
  if (has_graph) return Action::kReplay;
  return exhausted() ? Action::kQueue : Action::kCapture;
}

}  // namespace cistron::train
