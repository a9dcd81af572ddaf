// Checkpoints when the process dies or the disk is full, at every system call of a save.
//
// The calls that change files are interposed: this program's definitions come before libc's. A
// child process saves and is killed, or is told that the disk is full, at its n-th call, for every
// n; then a reader must find a complete checkpoint. The log of calls also shows that everything is
// durable before the name appears: what a power loss would need.
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/file.h"

namespace {

enum class Fault { kNone, kKill, kFullDisk };
Fault fault = Fault::kNone;
long fault_at = 0;     // the call that fails, from 1
long calls = 0;        // calls so far, while armed or logging
bool logging = false;  // the parent's own save, for the order of calls
std::vector<std::string>* call_log = nullptr;

std::string PathOf(int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof(path));
  return n < 0 ? "?" : std::string(path, static_cast<std::size_t>(n));
}

// Counts a call; true when it must fail with ENOSPC. `needs_space`: whether a full disk refuses it.
bool Fails(const std::string& what, bool needs_space) {
  if (logging) call_log->push_back(what);
  if (fault == Fault::kNone) return false;
  ++calls;
  if (fault == Fault::kKill && calls == fault_at) kill(getpid(), SIGKILL);
  if (fault == Fault::kFullDisk && needs_space && calls >= fault_at) {
    errno = ENOSPC;
    return true;
  }
  return false;
}

bool Watching() {
  return logging || fault != Fault::kNone;
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* data, size_t bytes) {
  if (Watching() && fd > 2 && Fails("write " + PathOf(fd), true)) return -1;
  return syscall(SYS_write, fd, data, bytes);
}
int fsync(int fd) {
  if (Watching() && Fails("fsync " + PathOf(fd), false)) return -1;
  return static_cast<int>(syscall(SYS_fsync, fd));
}
int mkdir(const char* path, mode_t mode) {
  if (Watching() && Fails(std::string("mkdir ") + path, true)) return -1;
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}
int rename(const char* from, const char* to) {
  if (Watching() && Fails(std::string("rename ") + from + " " + to, false)) return -1;
  return static_cast<int>(syscall(SYS_rename, from, to));
}
int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  if (Watching() && Fails(std::string("exchange ") + from + " " + to, false)) return -1;
  return static_cast<int>(syscall(SYS_renameat2, from_at, from, to_at, to, flags));
}
int unlinkat(int at, const char* path, int flags) {
  if (Watching() && Fails(std::string("unlink ") + path, false)) return -1;
  return static_cast<int>(syscall(SYS_unlinkat, at, path, flags));
}

}  // extern "C"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kElements = 3000;

Tensor Values(std::int64_t step, std::int64_t elements = kElements) {
  Tensor t = Tensor::Empty({elements}, DType::kI64);
  std::int64_t i = 0;
  for (std::int64_t& v : t.span<std::int64_t>()) v = step * 1'000'003 + i++;
  return t;
}

void Save(const fs::path& root, std::int64_t step, std::int64_t elements = kElements) {
  const std::vector<CheckpointBox> boxes = {
      {"weight/w", Values(step, elements), {elements}, {0}},
      {"moment/w", Values(step + 1, elements), {elements}, {0}}};
  SaveCheckpoint(root, step, boxes, fmt::format("{{\"step\": {}}}", step));
}

// The newest good checkpoint's step, its content checked; -1 when there is none.
std::int64_t CheckedStep(const fs::path& root, std::int64_t elements = kElements) {
  const auto path = NewestGoodCheckpoint(root);
  if (!path) return -1;
  const CheckpointReader reader(*path);
  const Tensor w = reader.Read("weight/w"), expected = Values(reader.step(), elements);
  EXPECT_EQ(std::memcmp(w.raw(), expected.raw(), static_cast<std::size_t>(w.bytes())), 0);
  EXPECT_EQ(reader.state_json(), fmt::format("{{\"step\":{}}}", reader.step()));
  return reader.step();
}

int CountEntries(const fs::path& root) {
  return static_cast<int>(std::distance(fs::directory_iterator(root), fs::directory_iterator()));
}

class CheckpointCrash : public ::testing::Test {
 protected:
  void SetUp() override {
    // In memory where there is such a file system: what is tested is the order of calls.
    const fs::path base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ::testing::TempDir();
    root_ = base / ("cistron_crash_test." + std::to_string(::getpid()));
    fs::remove_all(root_);
    SetLogLevel(LogLevel::kError);
  }
  void TearDown() override { fs::remove_all(root_); }

  // Runs f in a child; its exit status, or −signal.
  template <class F>
  static int InChild(F&& f) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      int code = 0;
      try {
        f();
      } catch (const Error& e) {
        code = e.code() == ErrorCode::kIo && e.message().find("No space left") != std::string::npos
                   ? 3
                   : 4;
      } catch (...) {
        code = 5;
      }
      fault = Fault::kNone;
      _exit(code);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

  fs::path root_;
};

// A save that replaces the only checkpoint, one of a new step, and pruning: killed at every call.
TEST_F(CheckpointCrash, SaveHalfWritten) {
  long n = 1;
  for (;; ++n) {
    fs::remove_all(root_);
    Save(root_, 1);
    const int result = InChild([&] {
      fault = Fault::kKill;
      fault_at = n;
      Save(root_, 1);  // the only one there is
      Save(root_, 2);
      PruneCheckpoints(root_, 1);
    });
    const std::int64_t step = CheckedStep(root_);
    EXPECT_TRUE(step == 1 || step == 2) << "killed at call " << n << ": step " << step;
    // The next run cleans up and goes on.
    Save(root_, 3);
    PruneCheckpoints(root_, 1);
    EXPECT_EQ(CheckedStep(root_), 3);
    EXPECT_EQ(CountEntries(root_), 1) << "killed at call " << n;
    if (result == 0) {
      EXPECT_EQ(step, 2);
      break;
    }
    ASSERT_EQ(result, -SIGKILL) << "at call " << n;
  }
  EXPECT_GT(n, 20) << "the calls of a save were not seen";
}

TEST_F(CheckpointCrash, FullDiskAtEveryCall) {
  long n = 1;
  for (;; ++n) {
    fs::remove_all(root_);
    Save(root_, 1);
    const int result = InChild([&] {
      fault = Fault::kFullDisk;
      fault_at = n;
      Save(root_, 2);
    });
    if (result == 0) break;
    ASSERT_EQ(result, 3) << "at call " << n;  // kIo that says that no space is left
    EXPECT_EQ(CheckedStep(root_), 1);
    EXPECT_EQ(CountEntries(root_), 1) << "something half-written is left, call " << n;
  }
  EXPECT_EQ(CheckedStep(root_), 2);
  EXPECT_GT(n, 4) << "the calls of a save were not seen";
}

// The same from the kernel: files may not grow beyond a limit.
TEST_F(CheckpointCrash, LimitedFileSize) {
  for (const rlim_t limit :
       {rlim_t{0}, rlim_t{100}, rlim_t{8192}, rlim_t{30'000}, rlim_t{48'000}}) {
    fs::remove_all(root_);
    Save(root_, 1);
    const int result = InChild([&] {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit most = {limit, limit};
      setrlimit(RLIMIT_FSIZE, &most);
      Save(root_, 2);
    });
    EXPECT_EQ(result, 4) << limit;  // kIo, "File too large"
    EXPECT_EQ(CheckedStep(root_), 1);
    EXPECT_EQ(CountEntries(root_), 1);
  }
}

// Every file is synced after its last write, then the directory, before it gets its name; then the
// parent.
TEST_F(CheckpointCrash, DurableBeforeTheNameAppears) {
  Save(root_, 1);
  for (const char* name_call : {"rename ", "exchange "}) {
    std::vector<std::string> log;
    call_log = &log;
    logging = true;
    Save(root_, 2);  // first a new step, then one that is there
    logging = false;
    const auto find = [&](const std::string& prefix, std::size_t from) {
      for (std::size_t i = from; i < log.size(); ++i) {
        if (log[i].starts_with(prefix)) return i;
      }
      return log.size();
    };
    const std::size_t named = find(name_call, 0);
    ASSERT_LT(named, log.size());
    int written = 0;
    for (std::size_t i = 0; i < log.size(); ++i) {
      if (!log[i].starts_with("write ")) continue;
      ++written;
      EXPECT_LT(find("fsync " + log[i].substr(6), i), named) << log[i];
      const std::string directory = fs::path(log[i].substr(6)).parent_path();
      std::size_t last_sync = 0;
      for (std::size_t j = i; j < named; ++j) {
        if (log[j] == "fsync " + directory) last_sync = j;
      }
      EXPECT_GT(last_sync, find("fsync " + log[i].substr(6), i)) << log[i];
    }
    EXPECT_GE(written, 2);
    EXPECT_LT(find("fsync " + fs::canonical(root_).string(), named), log.size());
    // The old directory goes only when the new name is durable.
    EXPECT_GE(find("unlink ", 0), find("fsync " + fs::canonical(root_).string(), named));
  }
}

// No interposed call chooses the moment here: a child saves without end and is killed at random.
TEST_F(CheckpointCrash, KilledAtRandom) {
  constexpr unsigned kSeed = 5;
  constexpr std::int64_t kMany = 60'000;
  std::mt19937 random(kSeed);
  std::int64_t newest = 0;
  Save(root_, newest, kMany);
  for (int round = 0; round < 25; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        for (std::int64_t step = newest + 1;; ++step) {
          Save(root_, step, kMany);
          PruneCheckpoints(root_, 2);
        }
      } catch (...) {
        _exit(1);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "seed " << kSeed << ": the child failed by itself";
    const std::int64_t step = CheckedStep(root_, kMany);
    ASSERT_GE(step, newest) << "seed " << kSeed << " round " << round;
    newest = step;
  }
  PruneCheckpoints(root_, 1);
  EXPECT_EQ(CountEntries(root_), 1);
}

TEST_F(CheckpointCrash, AtomicFileKeepsTheOldOneWhenTheDiskIsFull) {
  fs::create_directories(root_);
  WriteFileAtomically(root_ / "f", "old");
  EXPECT_EQ(InChild([&] {
              fault = Fault::kFullDisk;
              fault_at = 1;
              WriteFileAtomically(root_ / "f", "new");
            }),
            3);
  EXPECT_EQ(ReadFile(root_ / "f"), "old");
  EXPECT_EQ(CountEntries(root_), 1);
}

}  // namespace
}  // namespace cistron::io
