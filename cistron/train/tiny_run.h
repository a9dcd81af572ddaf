// For tests only: a folder with a small FASTA file, and configurations of runs of a few seconds on
// it.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cistron/base/philox.h"
#include "cistron/comm/inproc.h"
#include "cistron/io/checkpoint.h"
#include "cistron/train/metrics.h"
#include "cistron/train/trainer.h"

namespace cistron::train {

class TinyRun {
 public:
  explicit TinyRun(const std::string& name)
      : folder_(Root() / fmt::format("cistron-{}-{}", name, getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    // Two records; the second has soft-masked and degenerate bases, so that weights differ by row.
    std::ofstream out(folder_ / "tiny.fa");
    out << ">first\n"
        << Letters("ACGT", 1, 3000) << "\n>second\n"
        << Letters("ACGTacgtN", 2, 1500) << "\n";
    sink_ = std::tmpfile();
  }
  ~TinyRun() {
    std::fclose(sink_);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  TinyRun(const TinyRun&) = delete;
  TinyRun& operator=(const TinyRun&) = delete;

  std::filesystem::path path(const std::string& name) const { return folder_ / name; }

  // Arguments of `cistron train` for a run in folder/`output`, later ones winning.
  std::vector<std::string> Overrides(const std::string& output,
                                     const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {
        "output=" + path(output).string(),
        "data.train=" + path("tiny.fa").string(),
        "data.cache_dir=" + path("cache").string(),
        "data.soft_mask_weight=0.5",
        "data.seq_len=32",
        "batch.global_tokens=128",
        "train.steps=10",
        "eval.every=4",
        "eval.tokens=64",
        "checkpoint.every=3",
        "checkpoint.keep=20",
        "optim.lr=0.01",
        "optim.warmup_steps=2",
        "optim.floor_ratio=0.1",
        "model.vocab_size=128",
        "model.hidden_size=16",
        "model.intermediate_size=24",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=1",
        "model.num_local_experts=4",
        "model.num_experts_per_tok=2",
        "model.max_position_embeddings=64",
        "model.router_aux_loss_coef=0.02",
        "model.output_router_logits=true",
    };
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  LoadedConfig Load(const std::string& output, const std::vector<std::string>& more = {}) const {
    LoadedConfig loaded = ParseRunConfig("", "", Overrides(output, more));
    ResolveInit(loaded);
    return loaded;
  }

  // Trains; a stop is asked for after `stop_after` steps of the run.
  TrainOutcome Train(const std::string& output, const std::vector<std::string>& more = {},
                     std::int64_t stop_after = -1) {
    std::int64_t step = 0;
    const RunPaths paths{path(output)};
    TrainHooks hooks;
    hooks.stop_requested = [&] {
      const auto lines = ReadMetrics(paths.metrics());
      step = lines.empty() ? 0 : lines.back().step;
      return step == stop_after;
    };
    std::rewind(sink_);
    hooks.out = sink_;
    const TrainOutcome outcome = train::Train(Load(output, more), hooks);
    const long end = std::ftell(sink_);
    std::rewind(sink_);
    printed_.resize(static_cast<std::size_t>(end));
    if (std::fread(printed_.data(), 1, printed_.size(), sink_) != printed_.size()) printed_.clear();
    return outcome;
  }
  // Trains on ranks that are threads of this process, as many as `more` says; prints nowhere.
  void TrainOnRanks(const std::string& output, const std::vector<std::string>& more) const {
    const LoadedConfig loaded = Load(output, more);
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out{std::tmpfile(), &std::fclose};
    comm::RunRanks(static_cast<int>(loaded.config.Ranks()), [&](comm::Communicator& ranks) {
      TrainHooks hooks;
      hooks.out = out.get();
      train::Train(loaded, hooks, &ranks);
    });
  }
  // What the last run printed.
  const std::string& printed() const { return printed_; }

  std::vector<StepMetrics> Metrics(const std::string& output) const {
    return ReadMetrics(RunPaths{path(output)}.metrics());
  }
  io::CheckpointReader Newest(const std::string& output) const {
    return io::CheckpointReader(
        io::NewestGoodCheckpoint(RunPaths{path(output)}.checkpoints()).value());
  }

 private:
  // In memory where there is such a file system: runs sync many small files.
  static std::filesystem::path Root() {
    const char* memory = "/dev/shm";
    return access(memory, W_OK) == 0 ? std::filesystem::path(memory)
                                     : std::filesystem::temp_directory_path();
  }

  static std::string Letters(const std::string& letters, std::uint64_t seed, std::size_t count) {
    const RandomStream stream(seed, "tiny_run");
    std::string text;
    // Repeats of a few motifs: there is something to learn in ten steps.
    std::string motif;
    for (std::size_t i = 0; i < count; ++i) {
      if (i % 40 < 30 || motif.size() < 20) {
        text += letters[stream.Below(i, letters.size())];
        if (motif.size() < 20) motif += text.back();
      } else {
        text += motif[i % 20];
      }
      if (text.size() % 71 == 70) text += '\n';
    }
    return text;
  }

  std::filesystem::path folder_;
  std::FILE* sink_;
  std::string printed_;
};

}  // namespace cistron::train
