// cistron info: what this machine and this build can do.
#include <fmt/format.h>

#include "apps/cistron/commands.h"
#include "apps/cistron/machine.h"
#include "cistron/base/env.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/ops/attention/attention.h"
#include "cistron/ops/instruction_set.h"
#include "cistron/ops/support_matrix.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::app {
namespace {

class InfoCommand final : public Command {
 public:
  std::string name() const override { return "info"; }
  std::string summary() const override {
    return "CPU features, threads, libraries and build of this program";
  }
  std::string footer() const override { return "Examples:\n  cistron info\n  cistron info --ops"; }
  void Declare(Options& options) override {
    options.Flag("--ops", ops_, "which implementation runs each op in each precision");
  }

  int Run() override {
    if (ops_) {
      fmt::print("{}", ops::FormatSupportMatrix());
      return kOk;
    }
    const auto line = [](const std::string& key, const std::string& value) {
      fmt::print("{:<20} {}\n", key, value);
    };
    for (const auto& [name, value] : MachineFacts()) line(name, value);
    line("kernels", ops::InstructionSetInUse());
    line("CUDA", cuda::Describe());
    line("cuDNN", ops::DescribeCudnn());
    for (const std::string& device : DeviceTexts()) line("device", device);
    line("MPI", comm::mpi::Describe());
    line("NCCL", comm::nccl::Describe());
    line("precisions", "fp32, bf16, fp8_delayed, fp8_current, fp8_block, mxfp8");
    for (const char* variable : {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
                                 "CISTRON_IMPL", "CISTRON_ISA", "CISTRON_CONFIG_PATH"}) {
      line(variable, GetEnv(variable).value_or("not set"));
    }
    return kOk;
  }

 private:
  bool ops_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeInfoCommand() {
  return std::make_unique<InfoCommand>();
}

}  // namespace cistron::app
