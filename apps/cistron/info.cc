// cistron info: what this machine and this build can do.
#include <fmt/format.h>

#include "apps/cistron/commands.h"
#include "apps/cistron/machine.h"
#include "cistron/base/env.h"

namespace cistron::app {
namespace {

class InfoCommand final : public Command {
 public:
  std::string name() const override { return "info"; }
  std::string summary() const override {
    return "CPU features, threads, libraries and build of this program";
  }
  std::string footer() const override { return "Example:\n  cistron info"; }
  void Declare(Options&) override {}

  int Run() override {
    const auto line = [](const std::string& key, const std::string& value) {
      fmt::print("{:<20} {}\n", key, value);
    };
    for (const auto& [name, value] : MachineFacts()) line(name, value);
    line("devices", "cpu (this build has no CUDA)");
    line("precisions", "fp32, bf16");
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
