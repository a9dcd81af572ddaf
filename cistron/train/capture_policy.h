// When a step is captured in a CUDA graph: decided from the layouts of steps alone.
#pragma once

#include <cstdint>
#include <vector>

namespace cistron::train {

// A layout (StepInputs::layout) is worth a graph when it comes the second time in a row. A run
// whose layouts change as often as kMostCaptures captures no more.
class CapturePolicy {
 public:
  enum class Action { kReplay, kCapture, kQueue };
  static constexpr int kMostCaptures = 8;
  // Layouts in a row, each unlike the one before, after which a run is told that they differ.
  static constexpr int kToldChanges = 4;

  // What to do with the next step; `has_graph`: of the layout of the step before.
  Action Next(const std::vector<std::int64_t>& layout, bool has_graph);
  // A graph was captured, or that failed.
  void CountCapture() { ++captures_; }

  int captures() const { return captures_; }
  // Whether no step can be captured any more.
  bool exhausted() const { return captures_ >= kMostCaptures; }
  // Whether so many layouts in a row differed that it is worth telling.
  bool changes() const { return changes_ >= kToldChanges; }

 private:
  std::vector<std::int64_t> layout_;
  int captures_ = 0, changes_ = 0;
};

}  // namespace cistron::train
