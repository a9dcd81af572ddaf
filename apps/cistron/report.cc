// cistron report: a run directory becomes one HTML page.
#include <fmt/format.h>

#include "apps/cistron/commands.h"
#include "cistron/io/file.h"
#include "cistron/train/report.h"

namespace cistron::app {
namespace {

class ReportCommand final : public Command {
 public:
  std::string name() const override { return "report"; }
  std::string summary() const override {
    return "make one self-contained HTML page with plots from a run directory";
  }
  std::string footer() const override {
    return "Examples:\n"
           "  cistron report runs/L0_sanity\n"
           "  cistron report runs/L0_sanity --output L0.html --curve L0.svg";
  }
  void Declare(Options& options) override {
    options.Positional("RUN", run_, "run directory");
    options.Option("--curve", curve_, "SVG file for the learning curve alone; empty: none");
    options.Option("--output", output_, "file to write; empty: report.html in the run directory");
  }

  int Run() override {
    fmt::print("{}\n", train::WriteReport(run_, output_).string());
    if (!curve_.empty()) {
      io::WriteFileAtomically(curve_, train::RenderLearningCurve(train::ReadRunRecord(run_)));
      fmt::print("{}\n", curve_);
    }
    return kOk;
  }

 private:
  std::string run_, output_, curve_;
};

}  // namespace

std::unique_ptr<Command> MakeReportCommand() {
  return std::make_unique<ReportCommand>();
}

}  // namespace cistron::app
