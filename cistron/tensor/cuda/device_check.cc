#include "cistron/tensor/cuda/device_check.h"

#include <fmt/format.h>

#include <charconv>

namespace cistron::cuda {
namespace {

constexpr int kMinMajor = 8;

std::string_view Next(std::string_view& list) {
  const std::size_t end = list.find(';');
  const std::string_view entry = list.substr(0, end);
  list = end == std::string_view::npos ? std::string_view() : list.substr(end + 1);
  return entry;
}

}  // namespace

std::string VersionText(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string DescribeVersions(int runtime, int driver) {
  if (driver == 0) return fmt::format("CUDA {}, no driver", VersionText(runtime));
  return fmt::format("CUDA {}, driver for CUDA {}", VersionText(runtime), VersionText(driver));
}

bool HasKernelsFor(std::string_view architectures, int major, int minor) {
  while (!architectures.empty()) {
    const std::string_view entry = Next(architectures);
    int capability = 0;
    const char* const end = entry.data() + entry.size();
    const char* const stop = std::from_chars(entry.data(), end, capability).ptr;
    const bool exact = stop != end;  // "90a"
    if (capability / 10 != major) continue;
    if (exact ? capability % 10 == minor : capability % 10 <= minor) return true;
  }
  return false;
}

std::string DeviceRefusal(const DeviceFacts& f, std::string_view architectures) {
  const std::string found = DescribeVersions(f.runtime, f.driver);
  if (f.driver > 0 && f.driver / 1000 < f.runtime / 1000) {
    return fmt::format(
        "cuda: the driver is too old: it is for CUDA {}, and this build needs one for CUDA {}.0 or "
        "newer. Install a newer NVIDIA driver, or use device=cpu",
        VersionText(f.driver), f.runtime / 1000);
  }
  if (!f.error.empty() || f.count == 0) {
    return fmt::format(
        "cuda: no GPU can be used: {} ({}); needed is an NVIDIA driver for CUDA {}.0 or newer and "
        "a "
        "GPU. Use device=cpu without them",
        f.driver == 0     ? "no NVIDIA driver is loaded"
        : f.error.empty() ? "the driver shows none"
                          : f.error,
        found, f.runtime / 1000);
  }
  if (f.index < 0 || f.index >= f.count) {
    return fmt::format("cuda: there is no cuda:{}, the driver shows {} GPUs", f.index, f.count);
  }
  if (f.major < kMinMajor) {
    return fmt::format(
        "cuda: cuda:{} is {} with compute capability {}.{}; needed is {}.0 or newer. Use "
        "device=cpu",
        f.index, f.name, f.major, f.minor, kMinMajor);
  }
  if (!HasKernelsFor(architectures, f.major, f.minor)) {
    const char* const exact = f.major >= 9 ? "a" : "";
    return fmt::format(
        "cuda: cuda:{} is {} with compute capability {}.{}, and this build has kernels for {} "
        "alone; "
        "configure with -DCISTRON_CUDA_ARCHITECTURES=\"{}{}{}\", or use device=cpu",
        f.index, f.name, f.major, f.minor, architectures, f.major, f.minor, exact);
  }
  return {};
}

}  // namespace cistron::cuda
