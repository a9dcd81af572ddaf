// cistron baseline: what a DNA model has to beat.
#include <fmt/format.h>

#include "apps/cistron/commands.h"
#include "cistron/base/error.h"
#include "cistron/data/corpus.h"
#include "cistron/train/corpus_baseline.h"
#include "cistron/train/run_config.h"
#include "cistron/train/run_directory.h"

namespace cistron::app {
namespace {

class BaselineCommand final : public Command {
 public:
  std::string name() const override { return "baseline"; }
  std::string summary() const override {
    return "fit order-k Markov models on the same split and score them";
  }
  std::string footer() const override {
    return "With a run directory, its data and split are used and baseline.json is written there "
           "for\n"
           "the report. Otherwise the data comes from a preset and key=value.\n"
           "Examples:\n"
           "  cistron baseline runs/L0_sanity\n"
           "  cistron baseline --config-name L0_sanity\n"
           "  cistron baseline data.train=genome.fa.gz data.train_fraction=0.9 --max-order "
           "12";
  }
  void Declare(Options& options) override {
    options.Option("--config-name", config_name_, "preset or YAML file whose data to use");
    options.Option("--max-order", max_order_,
                   "largest order, at most 31; -1: until higher orders gain nothing");
    options.Positional("run_or_overrides", words_, "a run directory, or key=value", false);
  }

  int Run() override {
    std::filesystem::path run;
    train::LoadedConfig loaded;
    if (words_.size() == 1 && config_name_.empty() && words_[0].find('=') == std::string::npos) {
      run = words_[0];
      const train::RunPaths paths{run};
      if (!std::filesystem::exists(paths.config())) {
        CISTRON_THROW(kNotFound, "{}: not a run directory (there is no config.yaml)", run.string());
      }
      loaded = train::LoadRunConfig(paths.config(), {});
    } else {
      const auto preset =
          config_name_.empty() ? std::filesystem::path() : train::FindPreset(config_name_);
      loaded = train::LoadRunConfig(preset, words_);
      train::ResolveDataPaths(loaded, preset);
      loaded.data_faults.Throw();
    }
    const data::DataConfig& config = loaded.config.data;
    if (config.train.empty()) {
      CISTRON_THROW(kBadInput,
                    "data.train names no file; give data.train=FILE, a preset or a run "
                    "directory");
    }
    if (const std::string why = train::WhyNoMarkovBaseline(config.alphabet); !why.empty()) {
      CISTRON_THROW(kBadInput, "{}: {}", loaded.Where("data.alphabet"), why);
    }
    if (max_order_ < -1 || max_order_ > train::kMaxMarkovOrder) {
      CISTRON_THROW(kInvalidArgument, "--max-order={}: not between -1 and {}", max_order_,
                    train::kMaxMarkovOrder);
    }
    train::MarkovOptions options;
    if (max_order_ >= 0) options.max_order = static_cast<int>(max_order_);
    const train::MarkovBaseline baseline =
        train::FitMarkovBaseline(*data::Corpus::Open(config), options);
    fmt::print("{}", train::FormatTable(baseline));
    if (!run.empty()) train::WriteBaseline(train::RunPaths{run}.baseline(), baseline);
    return kOk;
  }

 private:
  std::string config_name_;
  std::vector<std::string> words_;
  std::int64_t max_order_ = -1;
};

}  // namespace

std::unique_ptr<Command> MakeBaselineCommand() {
  return std::make_unique<BaselineCommand>();
}

}  // namespace cistron::app
