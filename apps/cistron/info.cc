// cistron info: what this machine and this build can do.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "apps/cistron/commands.h"
#include "apps/cistron/version.h"
#include "cistron/base/env.h"
#include "cistron/base/threads.h"

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

class InfoCommand final : public Command {
 public:
  std::string name() const override { return "info"; }
  std::string summary() const override {
    return "CPU features, threads, libraries and build of this program";
  }
  std::string footer() const override { return "Example:\n  cistron info"; }
  void Declare(Options&) override {}

  int Run() override {
    const auto line = [](const char* key, const std::string& value) {
      fmt::print("{:<14} {}\n", key, value);
    };
    line("cistron", fmt::format("{} ({}{}{}, {})", kVersion, kBuildType,
                                *kSanitizers ? ", sanitizers " : "", kSanitizers, kCompiler));
    line("CPU", CpuInfo("model name"));
    line("features", CpuFeatures());
    line("threads", fmt::format("{} used; {} granted by affinity and cgroup of {} in the machine",
                                NumThreads(), AvailableCpus(), sysconf(_SC_NPROCESSORS_ONLN)));
    const double bytes =
        static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
    line("memory", fmt::format("{:.1f} GiB", bytes / (1 << 30)));
    line("devices", "cpu (this build has no CUDA)");
    line("precisions", "fp32, bf16");
    const dnnl_version_t* dnnl = dnnl_version();
    line("libraries", fmt::format("oneDNN {}.{}.{}, Highway {}, htslib {}, yaml-cpp {}, fmt {}",
                                  dnnl->major, dnnl->minor, dnnl->patch, kHighwayVersion,
                                  kHtslibVersion, kYamlVersion, kFmtVersion));
    for (const char* variable : {"OMP_NUM_THREADS", "CISTRON_IMPL", "CISTRON_CONFIG_PATH"}) {
      line(variable, GetEnv(variable).value_or("not set"));
    }
    return kOk;
  }
};

}  // namespace

std::unique_ptr<Command> MakeInfoCommand() {
  return std::make_unique<InfoCommand>();
}

}  // namespace cistron::app
