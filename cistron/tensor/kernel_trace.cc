#include "cistron/tensor/kernel_trace.h"

#include <algorithm>

namespace cistron::cuda {

DeviceTime TimeOf(std::vector<Activity> activities) {
  if (activities.empty()) return {};
  std::sort(activities.begin(), activities.end(),
            [](const Activity& a, const Activity& b) { return a.begin_ns < b.begin_ns; });
  std::uint64_t covered_to = activities.front().begin_ns, busy = 0;
  for (const Activity& a : activities) {
    if (a.end_ns <= covered_to) continue;
    busy += a.end_ns - std::max(covered_to, a.begin_ns);
    covered_to = a.end_ns;
  }
  return {.span_ms = static_cast<double>(covered_to - activities.front().begin_ns) / 1e6,
          .busy_ms = static_cast<double>(busy) / 1e6,
          .kernels = static_cast<std::int64_t>(activities.size())};
}

}  // namespace cistron::cuda
