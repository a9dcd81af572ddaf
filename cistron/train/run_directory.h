// A run on disk: where everything lies, who is writing there, and whether a new command continues
// it.
//
//   config.yaml        the effective configuration
//   metrics.jsonl      one object a step (metrics.h)
//   checkpoints/       step-NNNNNNNN, newest last
//   final/             the trained model, as a Hugging Face directory
//   final.json       results of a finished run (metrics.h)
//   profile.txt        where the time of the steps of `profile` went
//   report.html        the picture of the run
#pragma once

#include <filesystem>
#include <string>

#include "cistron/train/run_config.h"

namespace cistron::train {

struct RunPaths {
  std::filesystem::path root;

  std::filesystem::path config() const { return root / "config.yaml"; }
  std::filesystem::path metrics() const { return root / "metrics.jsonl"; }
  std::filesystem::path checkpoints() const { return root / "checkpoints"; }
  std::filesystem::path final_model() const { return root / "final"; }
  std::filesystem::path results() const { return root / "final.json"; }
  std::filesystem::path expert_bases() const { return root / "expert_bases.json"; }
  std::filesystem::path baseline() const { return root / "baseline.json"; }
  std::filesystem::path machine() const { return root / "machine.json"; }
  std::filesystem::path profile() const { return root / "profile.txt"; }
  std::filesystem::path report() const { return root / "report.html"; }
  std::filesystem::path lock() const { return root / ".lock"; }
};

// The directory of a run, locked for this process for as long as the object lives.
class RunDirectory {
 public:
  // Decides by `run.on_exists` and opens the directory: an absent or empty one starts a run; one
  // that holds a run is resumed, refused or kept under another name; one that holds anything else
  // is refused. Throws kAlreadyExists (with the keys that differ), kIo; then nothing has changed on
  // disk.
  explicit RunDirectory(const LoadedConfig& loaded);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Writes config.yaml: once the run is known to be able to start, so that a command that is
  // refused leaves the run's configuration as it was.
  void WriteConfig(const RunConfig& config);

  const RunPaths& paths() const { return paths_; }
  bool resumes() const { return resumes_; }
  // What a person should know: keys and layout that a resumed run changes, where the old run went;
  // may be empty.
  const std::string& notice() const { return notice_; }

 private:
  void Lock();
  void MoveAside();
  void CheckResumable(const LoadedConfig& loaded);

  RunPaths paths_;
  bool resumes_ = false;
  std::string notice_;
  int lock_ = -1;
};

}  // namespace cistron::train
