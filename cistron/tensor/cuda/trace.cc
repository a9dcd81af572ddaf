#include "cistron/tensor/trace.h"

#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>

namespace cistron {

bool TraceIsOn() {
  // How the tools inject their library into a process that uses NVTX 3.
  static const bool on = std::getenv("NVTX_INJECTION64_PATH") != nullptr;
  return on;
}

void TraceRange::Push(const char* before, std::int64_t number, const char* after) {
  if (number < 0) {
    nvtxRangePushA(before);
  } else {
    nvtxRangePushA(fmt::format("{}{}{}", before, number, after).c_str());
  }
}

void TraceRange::Pop() {
  nvtxRangePop();
}

std::uint64_t StartTrace(std::string_view name, std::string_view detail) {
  return nvtxRangeStartA(fmt::format("{} ({})", name, detail).c_str());
}

void EndTrace(std::uint64_t range) {
  nvtxRangeEnd(range);
}

}  // namespace cistron
