// Everything that is wrong with a configuration, told at once.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::train {

class ConfigFaults {
 public:
  // Calls `check`; true where it found nothing. What it throws about input (kBadInput, kNotFound,
  // kUnsupported) is kept, everything else passes.
  bool Check(const std::function<void()>& check);
  // A fault with this text (fmt) unless `holds`; returns `holds`.
  template <class... Args>
  bool Need(bool holds, ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
    if (!holds) faults_.emplace_back(code, fmt::format(text, std::forward<Args>(args)...));
    return holds;
  }
  void Add(const ConfigFaults& others);
  std::size_t size() const { return faults_.size(); }
  // Throws the one fault that was found, or all of them in one error, one below the other in the
  // order in which they were found; nothing where there is none.
  void Throw() const;

 private:
  std::vector<Error> faults_;
};

}  // namespace cistron::train
