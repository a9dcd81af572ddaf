// Runs a program and catches what it prints.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace cistron::testing {

struct ProcessOptions {
  std::int64_t file_size_limit = 0;  // bytes; writes beyond it fail as on a full disk. 0: none
};

class Process {
 public:
  // Standard output and error go to files in `folder`.
  Process(const std::filesystem::path& folder, const std::vector<std::string>& arguments,
          const ProcessOptions& options = {})
      : out_(folder / "stdout.txt"), err_(folder / "stderr.txt") {
    std::vector<char*> argv;
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    if (std::freopen(out_.c_str(), "w", stdout) == nullptr ||
        std::freopen(err_.c_str(), "w", stderr) == nullptr) {
      _exit(126);
    }
    if (options.file_size_limit > 0) {
      std::signal(SIGXFSZ, SIG_IGN);  // the write fails instead
      const auto bytes = static_cast<rlim_t>(options.file_size_limit);
      const rlimit limit{bytes, bytes};
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    execv(argv[0], argv.data());
    _exit(127);
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int number) { kill(pid_, number); }
  // Exit status, or 128 + the signal that ended it.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  bool Running() {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }
  std::string Output() const { return Read(out_); }
  std::string Errors() const { return Read(err_); }

 private:
  static std::string Read(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::filesystem::path out_, err_;
  pid_t pid_ = -1;
};

}  // namespace cistron::testing
