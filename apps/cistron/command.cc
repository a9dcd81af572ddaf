// The command line. CLI11 is slow to compile and is included here alone.
#include "apps/cistron/command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <optional>

#include "apps/cistron/failure.h"
#include "apps/cistron/launched_rank.h"
#include "apps/cistron/version.h"
#include "cistron/base/error.h"
#include "cistron/parallel/agreement.h"

namespace cistron::app {
namespace {

class CliOptions final : public Options {
 public:
  explicit CliOptions(CLI::App& app) : app_(app) {}

  void Positional(const std::string& name, std::string& value, const std::string& help,
                  bool required) override {
    app_.add_option(name, value, help)->required(required);
  }
  void Positional(const std::string& name, std::vector<std::string>& values,
                  const std::string& help, bool required) override {
    app_.add_option(name, values, help)->required(required);
  }
  void Option(const std::string& name, std::string& value, const std::string& help) override {
    app_.add_option(name, value, help)->capture_default_str();
  }
  void Option(const std::string& name, std::vector<std::string>& values,
              const std::string& help) override {
    app_.add_option(name, values, help);
  }
  void Option(const std::string& name, std::int64_t& value, const std::string& help) override {
    app_.add_option(name, value, help)->capture_default_str();
  }
  void Option(const std::string& name, double& value, const std::string& help) override {
    app_.add_option(name, value, help)->capture_default_str();
  }
  void Flag(const std::string& name, bool& value, const std::string& help) override {
    app_.add_flag(name, value, help);
  }
  void Choice(const std::string& name, std::string& value, const std::vector<std::string>& choices,
              const std::string& help) override {
    app_.add_option(name, value, help)->capture_default_str()->check(CLI::IsMember(choices));
  }
  void Rest(std::vector<std::string>& values) override {
    app_.prefix_command();
    app_.parse_complete_callback([&app = app_, &values] { values = app.remaining(); });
  }

 private:
  CLI::App& app_;
};

// Of mpirun or srun, more than one.
std::optional<LaunchedRank> FindSeveralRanks() {
  auto launched = FindLaunchedRank();
  if (launched && launched->size == 1) launched.reset();
  return launched;
}

int RunCommand(Command& command) {
  try {
    const auto ranks = FindSeveralRanks();
    if (!ranks || command.RunsOnRanks()) return command.Run();
    return RunLaunched(*ranks, {}, [&](comm::Communicator& world) {
      throw parallel::SharedError(
          ErrorCode::kInvalidArgument,
          fmt::format("`cistron {}` runs as one process, and {} were started; leave out `{}`",
                      command.name(), world.size(), ranks->start));
    });
  } catch (const std::exception& error) {
    return ReportFailure(error);
  }
}

// What the command line says is wrong: said once, however many ranks were started with it.
int RefuseUsage(const std::string& message) {
  const Error error(ErrorCode::kInvalidArgument, message);
  try {
    if (const auto ranks = FindSeveralRanks()) return FailLaunched(*ranks, message);
  } catch (const std::exception& failure) {
    return ReportFailure(failure);
  }
  return ReportFailure(error);
}

}  // namespace

int RunProgram(int argc, char** argv, const std::vector<std::unique_ptr<Command>>& commands) {
  CLI::App app("Trains mixture-of-experts language models on biological sequences.", "cistron");
  app.set_version_flag("--version", std::string("cistron ") + kVersion);
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 done; 1 a check failed; 2 wrong options, configuration or input, too\n"
      "little memory, or a loss that is not finite; 3 the system refused (disk, device).\n"
      "`cistron VERB --help` shows each verb's options and examples.");
  int status = kOk;
  for (const auto& command : commands) {
    CLI::App* verb = app.add_subcommand(command->name(), command->summary());
    verb->footer(command->footer());
    CliOptions options(*verb);
    command->Declare(options);
    verb->callback([&status, &command] { status = RunCommand(*command); });
  }
  // CLI11 would only say that a subcommand is missing.
  if (argc > 1 && argv[1][0] != '-') {
    const auto known = [&](const auto& command) { return command->name() == argv[1]; };
    if (std::none_of(commands.begin(), commands.end(), known)) {
      return RefuseUsage(fmt::format("there is no verb '{}'\nsee `cistron --help`", argv[1]));
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    const auto ranks = FindSeveralRanks();
    return ranks && ranks->rank != 0 ? kOk : app.exit(success);
  } catch (const CLI::ParseError& error) {
    const auto used = app.get_subcommands();
    const std::string verb = used.empty() ? "" : " " + used.front()->get_name();
    return RefuseUsage(fmt::format("{}\nsee `cistron{} --help`", error.what(), verb));
  }
  return status;
}

}  // namespace cistron::app
