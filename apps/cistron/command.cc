// The command line. CLI11 is slow to compile and is included here alone.
#include "apps/cistron/command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>

#include "apps/cistron/version.h"
#include "cistron/base/error.h"

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

 private:
  CLI::App& app_;
};

int StatusOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kBadInput:
    case ErrorCode::kNotFound:
    case ErrorCode::kAlreadyExists:
    case ErrorCode::kUnsupported:
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kNumericalFailure: return kBadUsage;
    case ErrorCode::kIo:
    case ErrorCode::kInternal: break;
  }
  return kRuntimeFailure;
}

// By length: a message may quote a NUL.
void PrintError(std::string_view message) {
  std::fputs("error: ", stderr);
  std::fwrite(message.data(), 1, message.size(), stderr);
  std::fputc('\n', stderr);
}

int RunCommand(Command& command) {
  try {
    return command.Run();
  } catch (const Error& error) {
    PrintError(error.message());
    if (error.code() == ErrorCode::kInternal) {
      std::fprintf(stderr, "this is a bug in cistron %s (%s); please report it\n", kVersion,
                   error.where().c_str());
    }
    return StatusOf(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "error: out of memory; use a smaller batch.micro_tokens or model\n");
    return kBadUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return kRuntimeFailure;
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
      std::fprintf(stderr, "error: there is no verb '%s'\nsee `cistron --help`\n", argv[1]);
      return kBadUsage;
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const auto used = app.get_subcommands();
    const std::string verb = used.empty() ? "" : " " + used.front()->get_name();
    std::fprintf(stderr, "error: %s\nsee `cistron%s --help`\n", error.what(), verb.c_str());
    return kBadUsage;
  }
  return status;
}

}  // namespace cistron::app
