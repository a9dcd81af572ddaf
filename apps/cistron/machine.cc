#include "apps/cistron/machine.h"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "apps/cistron/version.h"
#include "cistron/base/threads.h"
#include "cistron/io/file.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::app {
namespace {

std::string CpuInfo(const std::string& field) {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(':');
    if (line.compare(0, field.size(), field) == 0 && colon != std::string::npos) {
      return line.substr(std::min(colon + 2, line.size()));
    }
  }
  return "unknown";
}

std::string CpuFeatures() {
  constexpr std::array kFeatures = {"avx2",        "fma",         "avx512f",  "avx512bw",
                                    "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile"};
  std::istringstream flags(CpuInfo("flags"));
  std::string out;
  for (std::string flag; flags >> flag;) {
    for (const char* feature : kFeatures) {
      if (flag == feature) out += (out.empty() ? "" : " ") + flag;
    }
  }
  return out.empty() ? "none beyond the baseline" : out;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> MachineFacts() {
  const double bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const dnnl_version_t* dnnl = dnnl_version();
  return {
      {"cistron", fmt::format("{} ({}{}{}, {})", kVersion, kBuildType,
                              *kSanitizers ? ", sanitizers " : "", kSanitizers, kCompiler)},
      {"CPU", CpuInfo("model name")},
      {"features", CpuFeatures()},
      {"threads", fmt::format("{} used; {} granted by affinity and cgroup of {} in the machine",
                              NumThreads(), AvailableCpus(), sysconf(_SC_NPROCESSORS_ONLN))},
      {"memory", fmt::format("{:.1f} GiB", bytes / (1 << 30))},
      {"libraries", fmt::format("oneDNN {}.{}.{}, Highway {}, htslib {}, yaml-cpp {}, fmt {}",
                                dnnl->major, dnnl->minor, dnnl->patch, kHighwayVersion,
                                kHtslibVersion, kYamlVersion, kFmtVersion)},
  };
}

void WriteMachine(const std::filesystem::path& file) {
  nlohmann::ordered_json j;
  for (const auto& [name, value] : MachineFacts()) j[name] = value;
  io::WriteFileAtomically(file, j.dump(2) + "\n");
}

std::vector<std::string> DeviceTexts() {
  std::vector<std::string> texts{"cpu"};
  for (const cuda::DeviceInfo& d : cuda::Devices()) {
    texts.push_back(fmt::format("cuda:{} {}, compute capability {}.{}, {} multiprocessors, {} MiB",
                                texts.size() - 1, d.name, d.major, d.minor, d.multiprocessors,
                                d.memory_bytes >> 20));
  }
  return texts;
}

ops::Context MakeContext(const std::string& device) {
  return ops::Context({device == "cuda" ? DeviceType::kCuda : DeviceType::kCpu, 0});
}

}  // namespace cistron::app
