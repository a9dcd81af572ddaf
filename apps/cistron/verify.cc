// cistron verify: golden values on this machine.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "apps/cistron/commands.h"
#include "apps/cistron/machine.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/train/precision.h"
#include "cistron/train/verify.h"

namespace cistron::app {
namespace {

class VerifyCommand final : public Command {
 public:
  std::string name() const override { return "verify"; }
  std::string summary() const override {
    return "compare this machine with golden values made by other software";
  }
  std::string footer() const override {
    return "PATH is a model folder: config.json, model.safetensors, golden.safetensors, "
           "about.json;\n"
           "or a file of numerics: 8-bit formats, products, router, permutation, schedule.\n"
           "Prints the worst error of each quantity beside its bound; exit status 1 beyond one.\n"
           "Examples:\n"
           "  cistron verify tests/golden/mixtral_tiny\n"
           "  cistron verify tests/golden/mixtral_gqa8 --precision bf16\n"
           "  cistron verify tests/golden/mixtral_tiny --precision mxfp8\n"
           "  cistron verify tests/golden/numerics.safetensors";
  }
  void Declare(Options& options) override {
    options.Positional("PATH", path_, "folder or file with golden values");
    options.Choice("--device", device_, {"cpu", "cuda"}, "where to compute");
    options.Choice("--precision", precision_,
                   {"", "fp64", "fp32", "bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"},
                   "of a model folder: number format, or a recipe over bf16; empty: fp32");
    options.Option("--threads", threads_, "0: all that the machine grants");
  }

  int Run() override {
    if (threads_ > 0) SetNumThreads(static_cast<int>(threads_));
    CheckPath();
    const bool numerics = std::filesystem::is_regular_file(path_);
    const train::VerifyReport report =
        numerics ? train::VerifyNumerics(MakeContext(device_), path_)
                 : train::VerifyModel(MakeContext(device_), path_, Precision());
    fmt::print("{}", train::FormatVerifyReport(report));
    return report.ok() ? kOk : kCheckFailed;
  }

 private:
  void CheckPath() const {
    const std::filesystem::path path = path_;
    if (std::filesystem::is_regular_file(path) && path.extension() != ".safetensors") {
      CISTRON_THROW(kBadInput,
                    "{}: not golden values; give a model folder or a file of numerics, "
                    "*.safetensors",
                    path_);
    }
    if (std::filesystem::is_regular_file(path)) {
      CheckNumerics(path);
      return;
    }
    if (!std::filesystem::is_directory(path) || HoldsGoldens(path)) return;
    std::vector<std::string> inside;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const bool file = entry.path().extension() == ".safetensors";
      if (file || (entry.is_directory() && HoldsGoldens(entry.path()))) {
        inside.push_back(entry.path().string());
      }
    }
    std::sort(inside.begin(), inside.end());
    CISTRON_THROW(kBadInput, "{}: no model folder with golden values (golden.safetensors){}{}",
                  path_, inside.empty() ? "" : "; give one of these:\n  ",
                  fmt::join(inside, "\n  "));
  }
  // A file that is no part of a model folder; it has values of every format, each computed in its
  // own.
  void CheckNumerics(const std::filesystem::path& file) const {
    const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
    if (HoldsGoldens(folder) && std::filesystem::exists(folder / "config.json")) {
      CISTRON_THROW(kBadInput,
                    "{}: a file of a model folder, which is verified as a whole; give {}", path_,
                    folder.string());
    }
    if (!precision_.empty()) {
      CISTRON_THROW(kInvalidArgument,
                    "--precision {}: {} is a file of numerics, each of which has a format of its "
                    "own; leave the option out, or give a model folder",
                    precision_, path_);
    }
  }
  static bool HoldsGoldens(const std::filesystem::path& folder) {
    return std::filesystem::exists(folder / "golden.safetensors");
  }

  train::VerifyPrecision Precision() const {
    if (precision_.empty()) return {};
    if (precision_ == "fp64") return {DType::kF64};
    const train::Precision precision = train::ParsePrecision(precision_);
    return {train::ModelDType(precision), train::MakeRecipe(precision, {})};
  }

  std::string path_, device_ = "cpu", precision_;
  std::int64_t threads_ = 0;
};

}  // namespace

std::unique_ptr<Command> MakeVerifyCommand() {
  return std::make_unique<VerifyCommand>();
}

}  // namespace cistron::app
