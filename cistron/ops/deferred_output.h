// An output whose memory is asked for when it is about to be written.
#pragma once

#include <functional>
#include <utility>

#include "cistron/ops/context.h"

namespace cistron::ops {

// For ops of several steps with large results: whoever allocates a result when it is asked for
// holds it no longer than need be, and it may take memory that an earlier step has freed.
class DeferredOutput {
 public:
  DeferredOutput() = default;      // not wanted
  DeferredOutput(Output output) {  // NOLINT(google-explicit-constructor): an output that is there
    if (output) ask_ = [output = std::move(output)] { return output; };
  }
  // `ask` is called once, by the thread that called the op.
  explicit DeferredOutput(std::function<Output()> ask) : ask_(std::move(ask)) {}

  explicit operator bool() const { return static_cast<bool>(ask_); }
  Output Get() const { return ask_(); }

 private:
  std::function<Output()> ask_;
};

}  // namespace cistron::ops
