// cistron train: a run from a configuration, or its continuation.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <string_view>
#include <utility>

#include "apps/cistron/commands.h"
#include "apps/cistron/launched_rank.h"
#include "apps/cistron/machine.h"
#include "apps/cistron/resume_command.h"
#include "apps/cistron/stop_signal.h"
#include "apps/cistron/version.h"
#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/data/corpus.h"
#include "cistron/io/file.h"
#include "cistron/io/manifest.h"
#include "cistron/parallel/agreement.h"
#include "cistron/parallel/mesh.h"
#include "cistron/train/config_schema.h"
#include "cistron/train/corpus_baseline.h"
#include "cistron/train/report.h"
#include "cistron/train/trainer.h"

namespace cistron::app {
namespace {

// Above this many training bases the Markov models take longer than a person waits.
constexpr std::int64_t kBaselineBases = 64'000'000;

// This program, by its file: two builds of one version may compute other bits.
std::string ProgramText() {
  const std::string program = io::ReadFile("/proc/self/exe");
  return fmt::format("cistron {} ({:016x})", kVersion,
                     io::Checksum(program.data(), program.size()));
}

class TrainCommand final : public Command {
 public:
  std::string name() const override { return "train"; }
  std::string summary() const override { return "train a model from a configuration, or resume"; }
  std::string footer() const override {
    return "Examples:\n"
           "  cistron train --config-name L0_sanity\n"
           "  cistron train --config-name L0_sanity output=runs/mine data.train=my.fa.gz "
           "optim.lr=2e-3\n"
           "  cistron train --config-name L0_sanity run.on_exists=new seed=2\n"
           "  cistron train --config-name L0_sanity init.from=runs/L0_sanity/final "
           "output=runs/more\n"
           "  cistron train --config-name L0_sanity parallel.ep=2\n"
           "  mpirun -np 2 cistron train --config-name L0_sanity parallel.ep=2\n"
           "\nSIGTERM, SIGINT and SIGUSR1 save and exit 0; the same command continues a run that "
           "was "
           "interrupted,\nexcept with run.on_exists=new and fail: leave those out then.\n"
           "\nKeys, with their defaults:\n" +
           train::DescribeConfigKeys();
  }
  void Declare(Options& options) override {
    options.Option("--config-name", config_name_,
                   "preset of configs/ (or of $CISTRON_CONFIG_PATH), or a path to a YAML file");
    options.Flag("--explain", explain_,
                 "print which implementation runs each op, how the experts are fused, and why, and "
                 "exit; needs neither the device nor the data, and reads the data where it is");
    options.Flag("--keys", keys_, "print the keys of a configuration and exit");
    options.Flag("--print-config", print_config_, "print the effective configuration and exit");
    options.Flag("--no-report", no_report_, "leave out the Markov baseline and report.html");
    options.Option(
        "--ranks", ranks_,
        "ranks that are threads of this process; 0: parallel.dp times parallel.ep, which "
        "it must be");
    options.Positional("overrides", overrides_, "key=value, over the preset", false);
  }

  bool RunsOnRanks() const override { return true; }

  int Run() override {
    CatchStopSignals();
    const auto launched = FindLaunchedRank();
    if (launched && GetEnv(kLaunchCommandVariable)) {
      fmt::print("{}\n", kSignalsCaughtLine);
      std::fflush(stdout);
    }
    if (keys_ || print_config_ || explain_) {
      if (!launched || launched->rank == 0) Print(launched ? launched->size : ranks_);
      return kOk;
    }
    train::TrainHooks hooks;
    hooks.resume_command = ResumeCommand();
    hooks.stop_requested = [] { return StopSignal() != nullptr; };
    train::TrainOutcome outcome;
    train::RunConfig config;
    if (launched && (launched->size > 1 || comm::mpi::IsBuilt())) {
      hooks.lines_only = true;
      if (launched->size > 1) hooks.program = ProgramText();
      const int status = TrainAsRank(*launched, hooks, config, outcome);
      if (status != kOk || launched->rank != 0) return status;
    } else {
      const train::LoadedConfig loaded = train::LoadRun(config_name_, overrides_);
      train::CheckRunConfig(loaded);
      config = loaded.config;
      outcome = TrainOnThreads(loaded, hooks);
    }
    if (!outcome.finished) return kOk;
    WriteMachine(outcome.paths.machine());
    const std::string comparison = no_report_ ? "" : Report(config, outcome);
    Conclude(config, outcome);
    if (!comparison.empty()) fmt::print("{}\n", comparison);
    return kOk;
  }

 private:
  // `ranks`: that were started; 0: as many as the configuration has.
  void Print(std::int64_t ranks) const {
    if (keys_) {
      fmt::print("{}", train::DescribeConfigKeys());
      return;
    }
    const train::LoadedConfig loaded = train::LoadRun(config_name_, overrides_);
    if (print_config_) {
      // A preset may leave its data to the user, and its device elsewhere.
      train::CheckStep(loaded);
      fmt::print("{}", train::ToYaml(loaded.config));
      return;
    }
    if (ranks > 0) {  // a number that the run would refuse
      parallel::Mesh::Check(static_cast<int>(ranks), loaded.config.parallel.dp,
                            loaded.config.parallel.ep, loaded.config.model.num_local_experts);
    }
    fmt::print("{}", train::ExplainRun(loaded));
  }

  static comm::Options WithTimeout(comm::Options options, const train::RunConfig& config) {
    options.limit = std::chrono::seconds(config.parallel.timeout);
    return options;
  }

  // Several ranks are threads of this process, which is one machine's only one.
  train::TrainOutcome TrainOnThreads(const train::LoadedConfig& loaded,
                                     const train::TrainHooks& hooks) const {
    const std::int64_t ranks = ranks_ != 0 ? ranks_ : loaded.config.Ranks();
    // Before threads are made of a number that was mistyped.
    CISTRON_CHECK(ranks >= 1 && ranks <= comm::kMostThreads,
                  "{} ranks cannot be threads of one process, which are 1…{}: correct {}, or start "
                  "processes with mpirun",
                  ranks, comm::kMostThreads,
                  ranks_ != 0 ? "--ranks" : "parallel.dp and parallel.ep");
    parallel::Mesh::Check(static_cast<int>(ranks), loaded.config.parallel.dp,
                          loaded.config.parallel.ep, loaded.config.model.num_local_experts);
    if (ranks == 1) return train::Train(loaded, hooks);
    if (loaded.config.threads > 0) SetNumThreads(static_cast<int>(loaded.config.threads));
    train::TrainOutcome outcome;
    comm::RunRanks(
        static_cast<int>(ranks),
        [&](comm::Communicator& rank) {
          train::TrainOutcome own = train::Train(loaded, hooks, &rank);
          if (rank.rank() == 0) outcome = std::move(own);
        },
        WithTimeout(comm::InprocOptions(), loaded.config));
    return outcome;
  }

  // This process is one rank, or the only one, of mpirun or srun. Returns the exit status.
  int TrainAsRank(const LaunchedRank& rank, const train::TrainHooks& hooks,
                  train::RunConfig& config, train::TrainOutcome& outcome) const {
    train::LoadedConfig loaded;
    std::exception_ptr refused;  // to be said once, when the ranks can talk
    try {
      CISTRON_CHECK(ranks_ == 0, "--ranks makes ranks of threads; leave it out under `{}`",
                    rank.start);
      loaded = train::LoadRun(config_name_, overrides_);
      train::CheckRunConfig(loaded);
    } catch (const std::exception&) {
      refused = std::current_exception();
    }
    config = loaded.config;
    ThreadShare share;
    if (config.threads > 0) {
      SetNumThreads(static_cast<int>(config.threads));
    } else if (!GetEnv("OMP_NUM_THREADS")) {
      share = ShareOfProcessors(rank);
      SetNumThreads(share.threads);
    }
    return RunLaunched(rank, WithTimeout({}, config), [&](comm::Communicator& world) {
      parallel::FromAll(world, [&] {
        if (refused) std::rethrow_exception(refused);
        return std::string();
      });
      if (world.rank() == 0 && !share.notice.empty()) fmt::print("{}\n", share.notice);
      outcome = train::Train(loaded, hooks, &world);
    });
  }

  // Writes the Markov baseline and the page; returns the comparison, or why there is none.
  static std::string Report(const train::RunConfig& config, const train::TrainOutcome& outcome) {
    std::string comparison;
    const std::string why_not = train::WhyNoMarkovBaseline(config.data.alphabet);
    if (outcome.heldout && !why_not.empty()) {
      comparison = fmt::format("no Markov baseline: {}", why_not);
    } else if (outcome.heldout) {
      const auto corpus = data::Corpus::Open(config.data);
      if (corpus->train_bases() <= kBaselineBases) {
        const train::MarkovBaseline baseline = train::FitMarkovBaseline(*corpus);
        train::WriteBaseline(outcome.paths.baseline(), baseline);
        comparison = Compare(*outcome.heldout, baseline);
      } else {
        comparison =
            fmt::format("Markov models: `cistron baseline {}`", outcome.paths.root.string());
      }
    }
    fmt::print("report: {}\n", train::WriteReport(outcome.paths.root).string());
    return comparison;
  }

  static void Conclude(const train::RunConfig& config, const train::TrainOutcome& outcome) {
    if (std::filesystem::exists(outcome.paths.final_model())) {
      fmt::print("model:  {}\n", outcome.paths.final_model().string());
    } else if (config.checkpoint.at_end) {  // of options that Mixtral lacks
      fmt::print("model:  the last checkpoint in {}\n", outcome.paths.checkpoints().string());
    }
    if (outcome.idle_experts.all > 0) {
      fmt::print("load:   {}\n", train::Describe(outcome.idle_experts));
    }
    if (outcome.heldout) {
      const std::string_view unit = data::UnitName(config.data.alphabet);
      fmt::print("held-out: {:.4f} bits per {} over {} {}s (loss {:.4f})\n",
                 outcome.heldout->bits_per_base, unit, outcome.heldout->bases, unit,
                 outcome.heldout->loss);
    } else {
      fmt::print("held-out: this run holds nothing out (data.split=none)\n");
    }
  }

  static std::string Compare(const train::HeldoutMetrics& heldout,
                             const train::MarkovBaseline& baseline) {
    const train::MarkovScore& best = baseline.Best();
    const double gain = best.bits_per_base - heldout.bits_per_base;
    const std::string warning = train::OrderWarning(baseline);
    return fmt::format(
        "best Markov model: {:.4f} bits per base ({}), over all {} held-out bases, each with its "
        "whole context; the model sees windows, whose first base is not scored\n"
        "the model is {:.4f} bits per base {} than {}{}{}",
        best.bits_per_base, train::Describe(best), baseline.heldout_bases, std::abs(gain),
        gain > 0 ? "better" : "worse",
        gain > 0 ? train::DescribeAll(baseline) : std::string("the best Markov model"),
        warning.empty() ? "" : "\nwarning: ", warning);
  }

  std::string config_name_;
  std::vector<std::string> overrides_;
  std::int64_t ranks_ = 0;
  bool explain_ = false, keys_ = false, print_config_ = false, no_report_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeTrainCommand() {
  return std::make_unique<TrainCommand>();
}

}  // namespace cistron::app
