// cistron launch: several ranks on this machine, for people who do not know MPI.
//
// With MPI the ranks are processes below an mpirun of its own process group: a Ctrl-C reaches this
// process alone, which asks the ranks to save and stop. (mpirun itself gives them one second.)
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string_view>

#include "apps/cistron/commands.h"
#include "apps/cistron/launched_rank.h"
#include "apps/cistron/rank_output.h"
#include "apps/cistron/resume_command.h"
#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/base/threads.h"
#include "cistron/comm/inproc.h"
#include "cistron/comm/mpi/mpi.h"
#include "cistron/train/run_config.h"

namespace cistron::app {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// An executable file of $PATH.
std::optional<std::string> FindProgram(const std::string& name) {
  std::istringstream folders(GetEnv("PATH").value_or("/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path path = fs::path(folder) / name;
    if (access(path.c_str(), X_OK) == 0 && fs::is_regular_file(path)) return path.string();
  }
  return std::nullopt;
}

[[noreturn]] void ThrowSystem(const char* call) {
  CISTRON_THROW(kIo, "launch: {} failed: {}", call, std::strerror(errno));
}

std::vector<char*> Pointers(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// A file descriptor that is closed.
struct File {
  explicit File(int number = -1) : fd(number) {}
  ~File() { Close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  void Close() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  int fd;
};

// mpirun and what its ranks print, until all have ended.
class MpirunJob {
 public:
  MpirunJob(const std::vector<std::string>& command, std::int64_t ranks) : deaf_(ranks) {
    sigset_t stops;
    sigemptyset(&stops);
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&stops, number);
    sigset_t before;
    sigprocmask(SIG_BLOCK, &stops, &before);
    signals_.fd = signalfd(-1, &stops, SFD_CLOEXEC);
    if (signals_.fd < 0) ThrowSystem("signalfd");
    std::array<int, 2> out{}, err{};
    if (pipe2(out.data(), O_CLOEXEC) != 0 || pipe2(err.data(), O_CLOEXEC) != 0) ThrowSystem("pipe");
    const pid_t parent = getpid();
    const std::vector<char*> argv = Pointers(command);
    pid_ = fork();
    if (pid_ < 0) ThrowSystem("fork");
    if (pid_ == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGTERM);  // no rank outlives this process
      sigprocmask(SIG_SETMASK, &before, nullptr);
      const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
      dup2(nothing, STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      dup2(err[1], STDERR_FILENO);
      if (getppid() == parent) execv(argv[0], argv.data());
      _exit(127);
    }
    out_.fd = out[0];
    err_.fd = err[0];
    close(out[1]);
    close(err[1]);
  }

  // The exit status of the run.
  int Wait() {
    RankOutput out([this](int rank, const std::string& line) { Show(stdout, rank, line); });
    RankOutput err([this](int rank, const std::string& line) { Show(stderr, rank, line); });
    while (out_.fd >= 0 || err_.fd >= 0) {
      std::array<pollfd, 3> files = {
          {{out_.fd, POLLIN, 0}, {err_.fd, POLLIN, 0}, {signals_.fd, POLLIN, 0}}};
      if (poll(files.data(), files.size(), -1) < 0 && errno != EINTR) ThrowSystem("poll");
      if (files[0].revents != 0) Read(out_, out);
      if (files[1].revents != 0) Read(err_, err);
      if (files[2].revents != 0) Stop();
    }
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0) {
      if (errno != EINTR) ThrowSystem("waitpid");
    }
    // What mpirun says of an error that a rank has told is no news.
    if (!error_told_) std::fputs(of_mpirun_.c_str(), stderr);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  static void Read(File& file, RankOutput& output) {
    std::array<char, 1 << 14> bytes{};
    const ssize_t count = read(file.fd, bytes.data(), bytes.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count > 0) return output.Add({bytes.data(), static_cast<std::size_t>(count)});
    output.Finish();
    file.Close();
  }

  // The first rank speaks for all: its lines stay as they are.
  void Show(std::FILE* to, int rank, const std::string& line) {
    if (rank == RankOutput::kLauncher) {
      if (asked_ && line.starts_with("mpirun: Forwarding signal")) return;
      of_mpirun_ += line + "\n";
      return;
    }
    if (line == kSignalsCaughtLine) {
      --deaf_;
      if (asked_) PassOn();
      return;
    }
    error_told_ = error_told_ || line.starts_with("error: ");
    const std::string name = rank == 0 ? "" : fmt::format("rank {}: ", rank);
    std::fprintf(to, "%s%s\n", name.c_str(), line.c_str());
    std::fflush(to);
  }

  void Stop() {
    signalfd_siginfo info{};
    if (read(signals_.fd, &info, sizeof(info)) != sizeof(info)) return;
    const auto now = Clock::now();
    // A terminal and `timeout` may send the same twice.
    if (asked_ && now - *asked_ < std::chrono::seconds(1)) return;
    const bool again = asked_.has_value();
    asked_ = now;
    if (again) {
      kill(pid_, SIGTERM);
      return;
    }
    std::fprintf(stderr, "launch: asked the ranks to save and stop; once more ends them now\n");
    PassOn();
  }

  // mpirun passes SIGUSR1 on to every rank, which then saves. It would end a rank that does not
  // catch it yet, and be lost on one that has not been started: such ranks are waited for.
  void PassOn() {
    if (deaf_ == 0) kill(pid_, SIGUSR1);
  }

  File signals_, out_, err_;
  pid_t pid_ = -1;
  std::int64_t deaf_;  // ranks that do not catch signals yet
  bool error_told_ = false;
  std::string of_mpirun_;
  std::optional<Clock::time_point> asked_;
};

class LaunchCommand final : public Command {
 public:
  std::string name() const override { return "launch"; }
  std::string summary() const override { return "train on several ranks of this machine"; }
  std::string footer() const override {
    return "Examples:\n"
           "  cistron launch -n 2 train --config-name L0_sanity parallel.ep=2\n"
           "  cistron launch -n 4 train --config-name L0_sanity parallel.dp=2 parallel.ep=2\n"
           "  cistron launch -n 2 --as threads train --config-name L0_sanity parallel.ep=2\n"
           "\nWhat follows the options is the command that every rank runs. Ranks are processes of "
           "Open\nMPI where this build and this machine have it, else threads of one process. Each "
           "has its\npart of the processors, unless `threads` or OMP_NUM_THREADS says otherwise. "
           "Output is that of\nrank 0; lines of other ranks begin with their number. Ctrl-C saves "
           "and stops all ranks, a\nsecond one ends them at once. The exit status is that of the "
           "run. Several machines: mpirun or\nsrun, see docs/parallel.md.";
  }
  void Declare(Options& options) override {
    options.Option("-n", ranks_, "number of ranks; parallel.dp times parallel.ep must be as many");
    options.Choice("--as", as_, {"auto", "processes", "threads"},
                   "what ranks are; auto: processes where Open MPI is there");
    options.Rest(command_);
  }

  int Run() override {
    if (const auto launched = FindLaunchedRank()) {
      CISTRON_THROW(kInvalidArgument, "launch starts ranks by itself; leave out `{}`",
                    launched->start);
    }
    if (ranks_ == 0) {
      const std::int64_t ranks = RanksOfCommand();
      CISTRON_THROW(kInvalidArgument,
                    "launch: -n says how many ranks to start, parallel.dp times parallel.ep of "
                    "them; write `cistron launch -n {} {}`{}",
                    ranks == 0 ? "N" : std::to_string(ranks),
                    command_.empty() ? "train …" : ShellQuoted(command_),
                    ranks == 0 ? ", as in `cistron launch -n 2 train --config-name L0_sanity "
                                 "parallel.ep=2`"
                               : "");
    }
    if (ranks_ < 1 || ranks_ > comm::kMostThreads) {
      CISTRON_THROW(kInvalidArgument, "-n {}: give the number of ranks, 1…{}", ranks_,
                    comm::kMostThreads);
    }
    if (command_.empty() || command_[0] != "train") {
      CISTRON_THROW(kInvalidArgument, "{}: ranks run `train`; write `cistron launch -n {} train …`",
                    command_.empty() ? "launch without a verb" : "'" + command_[0] + "'", ranks_);
    }
    setenv(kLaunchCommandVariable, OwnCommand().c_str(), 1);
    const auto mpirun = FindProgram("mpirun");
    const std::string lacking = !comm::mpi::IsBuilt() ? "this build has no MPI"
                                : !mpirun ? "there is no mpirun in PATH (Debian: openmpi-bin)"
                                          : "";
    if (as_ == "threads" || (as_ == "auto" && !lacking.empty())) return RunThreads(lacking);
    if (!lacking.empty()) {
      CISTRON_THROW(kUnsupported, "launch --as processes: {}; use --as threads", lacking);
    }
    return MpirunJob(MpirunCommand(*mpirun), ranks_).Wait();
  }

 private:
  // Of the run that the command names, whose configuration it must pass; 0 without a command, or
  // where its layout is of one rank, or of more than can be launched.
  std::int64_t RanksOfCommand() const {
    if (command_.empty() || command_[0] != "train") return 0;
    std::string preset;
    std::vector<std::string> overrides;
    for (std::size_t i = 1; i < command_.size(); ++i) {
      constexpr std::string_view kPreset = "--config-name", kRanks = "--ranks";
      const std::string& word = command_[i];
      if ((word == kPreset || word == kRanks) && i + 1 < command_.size()) {
        if (word == kPreset) preset = command_[i + 1];
        ++i;
      } else if (word.starts_with(std::string(kPreset) + "=")) {
        preset = word.substr(kPreset.size() + 1);
      } else if (!word.starts_with("-")) {
        overrides.push_back(word);
      }
    }
    const train::LoadedConfig loaded = train::LoadRun(preset, overrides);
    train::CheckStep(loaded);
    const std::int64_t ranks = loaded.config.Ranks();
    return ranks > 1 && ranks <= comm::kMostThreads ? ranks : 0;
  }

  static std::string Self() { return fs::read_symlink("/proc/self/exe").string(); }

  std::vector<std::string> MpirunCommand(const std::string& mpirun) const {
    // Ranks share the processors by themselves. Named, the host has as many slots as it needs, also
    // in an allocation of a batch system.
    std::vector<std::string> words = {mpirun,      "--host", fmt::format("localhost:{}", ranks_),
                                      "--bind-to", "none",   "--tag-output"};
    // mpirun refuses to run for root, which is who runs in a container.
    if (geteuid() == 0) words.emplace_back("--allow-run-as-root");
    if (ranks_ > AvailableCpus()) words.emplace_back("--oversubscribe");
    words.insert(words.end(), {"-np", std::to_string(ranks_), Self()});
    words.insert(words.end(), command_.begin(), command_.end());
    return words;
  }

  // This process becomes them.
  int RunThreads(const std::string& lacking) const {
    if (as_ == "auto") {
      fmt::print("ranks are threads of one process: {}\n", lacking);
      std::fflush(stdout);
    }
    const std::string self = Self();
    std::vector<std::string> words = {self, "train", "--ranks", std::to_string(ranks_)};
    words.insert(words.end(), command_.begin() + 1, command_.end());
    const std::vector<char*> argv = Pointers(words);
    execv(self.c_str(), argv.data());
    ThrowSystem("exec");
  }

  std::int64_t ranks_ = 0;
  std::string as_ = "auto";
  std::vector<std::string> command_;
};

}  // namespace

std::unique_ptr<Command> MakeLaunchCommand() {
  return std::make_unique<LaunchCommand>();
}

}  // namespace cistron::app
