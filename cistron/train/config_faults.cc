#include "cistron/train/config_faults.h"

#include <fmt/format.h>

#include <string>

namespace cistron::train {

bool ConfigFaults::Check(const std::function<void()>& check) {
  try {
    check();
    return true;
  } catch (const Error& e) {
    const ErrorCode code = e.code();
    if (code != ErrorCode::kBadInput && code != ErrorCode::kNotFound &&
        code != ErrorCode::kUnsupported) {
      throw;
    }
    faults_.push_back(e);
    return false;
  }
}

void ConfigFaults::Add(const ConfigFaults& others) {
  faults_.insert(faults_.end(), others.faults_.begin(), others.faults_.end());
}

void ConfigFaults::Throw() const {
  if (faults_.empty()) return;
  if (faults_.size() == 1) throw faults_.front();
  std::string text = fmt::format("the configuration has {} faults:", faults_.size());
  for (const Error& e : faults_) {
    text += "\n  ";
    for (const char c : e.message()) {
      text += c;
      if (c == '\n') text += "  ";  // below its first line
    }
  }
  throw Error(faults_.front().code(), text, faults_.front().where());
}

}  // namespace cistron::train
