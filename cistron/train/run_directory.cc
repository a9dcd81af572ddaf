#include "cistron/train/run_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/file.h"
#include "cistron/train/config_schema.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

// What a start that was killed before its first file leaves behind counts for nothing.
bool IsEmpty(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename() != ".lock" && !io::IsTemporary(entry.path())) return false;
  }
  return true;
}

// How to go on from the weights of the run in `root` with other keys; empty where that does not do:
// they decide what the weights mean, or there are no weights yet.
std::string WarmStart(const RunPaths& run, const std::vector<ConfigDifference>& identity) {
  for (const ConfigDifference& d : identity) {
    if (d.key.starts_with("model.")) return "";
  }
  const auto checkpoints = io::ListCheckpoints(run.checkpoints());
  if (identity.empty() || checkpoints.empty()) return "";
  return fmt::format("another output with init.from={}, a new run from the weights of this one, ",
                     checkpoints.back().string());
}

std::string Table(const std::vector<ConfigDifference>& differences) {
  std::string out;
  for (const ConfigDifference& d : differences) {
    out += fmt::format("\n  {}: {} in the saved run, {} now", d.key, d.saved, d.given);
  }
  return out;
}

}  // namespace

RunDirectory::RunDirectory(const LoadedConfig& loaded) : paths_{loaded.config.output} {
  const fs::path& root = paths_.root;
  try {
    if (fs::exists(root) && !fs::is_directory(root)) {
      CISTRON_THROW(kAlreadyExists, "output={}: this is a file, not a directory", root.string());
    }
    const bool occupied = fs::exists(root) && !IsEmpty(root);
    if (occupied && !fs::exists(paths_.config())) {
      CISTRON_THROW(kAlreadyExists,
                    "output={}: the directory holds something that is not a run; give "
                    "another output",
                    root.string());
    }
    fs::create_directories(root);
    Lock();
    io::RemoveStaleTemporaries(root);
    if (occupied) {
      switch (loaded.config.run.on_exists) {
        case OnExists::kFail:
          CISTRON_THROW(kAlreadyExists,
                        "output={}: the directory holds a run, and run.on_exists=fail; "
                        "give another output, or run.on_exists=resume or new",
                        root.string());
        case OnExists::kNew: MoveAside(); break;
        case OnExists::kAuto:
        case OnExists::kResume: CheckResumable(loaded); break;
      }
    }
  } catch (const fs::filesystem_error& error) {
    if (lock_ >= 0) close(lock_);
    CISTRON_THROW(kBadInput, "output={}: the directory cannot be used: {}", root.string(),
                  error.code().message());
  } catch (...) {
    if (lock_ >= 0) close(lock_);
    throw;
  }
}

RunDirectory::~RunDirectory() {
  if (lock_ >= 0) close(lock_);
}

void RunDirectory::WriteConfig(const RunConfig& config) {
  io::WriteFileAtomically(paths_.config(), ToYaml(config));
}

void RunDirectory::Lock() {
  lock_ = open(paths_.lock().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) {
    CISTRON_THROW(kBadInput, "output={}: the directory cannot be written: {}", paths_.root.string(),
                  std::strerror(errno));
  }
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    CISTRON_THROW(kAlreadyExists,
                  "output={}: another process is training in this directory; wait for "
                  "it, or give another output",
                  paths_.root.string());
  }
}

void RunDirectory::MoveAside() {
  fs::path kept;
  for (int n = 1;; ++n) {
    // A trailing slash would put the number inside the directory.
    fs::path root = paths_.root;
    if (!root.has_filename()) root = root.parent_path();
    kept = root.string() + fmt::format(".{}", n);
    if (!fs::exists(kept)) break;
  }
  fs::rename(paths_.root, kept);
  notice_ = fmt::format("the earlier run is kept as {}", kept.string());
  close(lock_);
  lock_ = -1;
  fs::create_directories(paths_.root);
  Lock();
}

void RunDirectory::CheckResumable(const LoadedConfig& loaded) {
  const LoadedConfig saved = LoadRunConfig(paths_.config(), {});
  const auto differences = CompareConfigs(saved.config, loaded.config);
  std::vector<ConfigDifference> identity;
  for (const ConfigDifference& d : differences) {
    if (d.role == KeyRole::kIdentity) identity.push_back(d);
  }
  const bool explicit_resume = loaded.config.run.on_exists == OnExists::kResume;
  const auto& refused = explicit_resume ? identity : differences;
  if (!refused.empty()) {
    CISTRON_THROW(
        kAlreadyExists,
        "output={}: the directory holds a run with another configuration:{}\n"
        "use the saved values, give another output, {}{}or run.on_exists=new, which keeps the "
        "old run under another name",
        paths_.root.string(), Table(refused), WarmStart(paths_, identity),
        identity.empty() ? "run.on_exists=resume to change them on the way, " : "");
  }
  resumes_ = true;
  if (!differences.empty()) {
    notice_ = fmt::format("resuming with changed keys:{}", Table(differences));
  }
  // Not refused: every layout trains what one rank with the same micro-steps trains.
  const std::string before = LayoutText(saved.config), now = LayoutText(loaded.config);
  if (before != now) {
    notice_ += fmt::format("{}resuming under another layout of ranks: {}, was {}",
                           notice_.empty() ? "" : "\n", now, before);
    const RunConfig& c = loaded.config;
    const bool of_micro_steps = c.model.aux_scope == model::AuxScope::kBatch && !c.WholeBatch() &&
                                c.Ranks() != saved.config.Ranks();
    if (of_micro_steps) {
      notice_ +=
          "; auxiliary losses of aux_scope=batch are taken over other micro-steps now, since "
          "batch.micro_tokens are of each rank";
    }
  }
}

}  // namespace cistron::train
