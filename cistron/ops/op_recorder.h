// OpRecorder: hears of every op that a context runs, for profiles.
#pragma once

#include <string_view>

namespace cistron::ops {

class OpRecorder {
 public:
  virtual ~OpRecorder() = default;
  // An op is about to run by the implementation of that name. Ops that are made of others are heard
  // of first, and what follows is heard of as the others.
  virtual void Begin(std::string_view op, std::string_view implementation) = 0;
  // Whether it wants every op to run by itself now; a captured step shows it none.
  virtual bool Times() const { return true; }
};

}  // namespace cistron::ops
