// One verb of the program: its options, its help, what it runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cistron::app {

// Exit statuses, the same for every verb.
enum ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,     // verify: a value beyond its bound
  kBadUsage = 2,        // wrong options, configuration or input; too little memory; a loss that
                        // is not finite
  kRuntimeFailure = 3,  // the system refused: disk, device; or a bug of ours
};

// Declares a verb's options. Defaults are the values that the variables hold; the variables must
// outlive the command.
class Options {
 public:
  virtual ~Options() = default;
  virtual void Positional(const std::string& name, std::string& value, const std::string& help,
                          bool required = true) = 0;
  virtual void Positional(const std::string& name, std::vector<std::string>& values,
                          const std::string& help, bool required = true) = 0;
  // `name`: "--device".
  virtual void Option(const std::string& name, std::string& value, const std::string& help) = 0;
  virtual void Option(const std::string& name, std::vector<std::string>& values,
                      const std::string& help) = 0;
  virtual void Option(const std::string& name, std::int64_t& value, const std::string& help) = 0;
  virtual void Option(const std::string& name, double& value, const std::string& help) = 0;
  virtual void Flag(const std::string& name, bool& value, const std::string& help) = 0;
  // One of these.
  virtual void Choice(const std::string& name, std::string& value,
                      const std::vector<std::string>& choices, const std::string& help) = 0;
  // Everything from the first word that is none of this verb's options.
  virtual void Rest(std::vector<std::string>& values) = 0;
};

class Command {
 public:
  virtual ~Command() = default;
  virtual std::string name() const = 0;
  virtual std::string summary() const = 0;
  // Shown below the options: examples first.
  virtual std::string footer() const = 0;
  virtual void Declare(Options& options) = 0;
  virtual int Run() = 0;
  // Whether several processes of mpirun or srun may run it; others are refused there.
  virtual bool RunsOnRanks() const { return false; }
};

// Parses the command line and runs the verb; turns errors into one screen of text and an exit
// status.
int RunProgram(int argc, char** argv, const std::vector<std::unique_ptr<Command>>& commands);

}  // namespace cistron::app
