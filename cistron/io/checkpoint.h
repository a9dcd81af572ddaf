// Checkpoints by global name and slice.
//
// A checkpoint is a directory `step-NNNNNNNN` with `manifest.json` and safetensors files. For each
// tensor the manifest lists its global shape, dtype and boxes {start, size of each dimension, file,
// key, checksum}; any set of boxes that covers the tensor exactly once is legal, so what one layout
// of ranks saved any other loads. One rank writes one box a tensor: the same format. Small state
// (step, data position, configuration) is a JSON document inside the manifest.
//
// A checkpoint appears atomically: everything is written and fsynced under a temporary name, the
// directory is renamed, its parent fsynced. Temporary directories are never picked up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::io {

// One box of a global tensor, held by this rank.
struct CheckpointBox {
  std::string name;  // canonical name with a role, e.g. "weight/model.norm.weight"
  Tensor tensor;     // the box's values, contiguous, host
  Shape global_shape;
  Shape start;  // where the box begins in the global tensor; its size is tensor.shape()
};

// Saves `boxes` and `state_json` (a JSON document) as root/step-NNNNNNNN and returns its path. The
// boxes of each name must cover its global tensor exactly once. A checkpoint of the same step is
// replaced in one step. Throws kIo; then nothing that a reader could pick up has been written, and
// the temporary directory is removed.
std::filesystem::path SaveCheckpoint(const std::filesystem::path& root, std::int64_t step,
                                     std::span<const CheckpointBox> boxes,
                                     const std::string& state_json);

// A checkpoint that several ranks write together: one of them holds the writer, every one writes
// its boxes into a file of its own, then the one commits. SaveCheckpoint is this with one rank.
class CheckpointWriter {
 public:
  // Makes a temporary directory, which is removed with this object unless it was committed. Throws
  // kIo.
  CheckpointWriter(const std::filesystem::path& root, std::int64_t step);
  ~CheckpointWriter();
  // Where the parts go; a path that the other ranks must see too.
  const std::filesystem::path& directory() const;
  // `parts`: what WriteCheckpointPart returned on each rank. Throws kInvalidArgument unless they
  // cover every tensor exactly once. Returns root/step-NNNNNNNN.
  std::filesystem::path Commit(std::span<const std::string> parts, const std::string& state_json);

  struct State;

 private:
  std::unique_ptr<State> state_;
};
// Writes the boxes of a rank, on that rank, and returns what Commit must know of them (JSON).
// Nothing is written where there are none.
std::string WriteCheckpointPart(const std::filesystem::path& directory, int rank,
                                std::span<const CheckpointBox> boxes);

// Reads a checkpoint. Not to be used by two threads at once.
class CheckpointReader {
 public:
  // Opens and validates the manifest: every file is there with its length, every tensor is covered
  // exactly once. Throws kNotFound or kBadInput, naming the tensor and the gap or overlap.
  explicit CheckpointReader(const std::filesystem::path& directory);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;
  CheckpointReader& operator=(CheckpointReader&&) noexcept;

  const std::filesystem::path& directory() const;
  std::int64_t step() const;
  const std::string& state_json() const;
  std::vector<std::string> names() const;
  struct Info {
    DType dtype;
    Shape global_shape;
    std::int64_t boxes;  // in how many parts it is stored
  };
  std::optional<Info> Find(const std::string& name) const;
  // Assembles a box of the global tensor from the stored boxes, verifying their checksums.
  Tensor Read(const std::string& name, const Shape& start, const Shape& size) const;
  Tensor Read(const std::string& name) const;  // the whole tensor
  // Verifies every checksum; returns the number of bytes read.
  std::int64_t VerifyAll() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Complete checkpoints under root, oldest first (by step). Unreadable ones are left out with a
// warning.
std::vector<std::filesystem::path> ListCheckpoints(const std::filesystem::path& root);
// The newest checkpoint whose manifest and checksums hold; nothing when there is none.
std::optional<std::filesystem::path> NewestGoodCheckpoint(const std::filesystem::path& root);
// Whether root holds anything under a checkpoint's name, sound or not: with no good one, a run has
// lost its state, which is not the same as having none yet.
bool HasCheckpointDirectories(const std::filesystem::path& root);
// Removes all that is older than the newest `keep` (≥ 1) good checkpoints, and stale temporary
// files. Good means read back in full: the newest good one is never removed. Damaged ones that are
// newer stay for inspection until `keep` good ones are newer still.
void PruneCheckpoints(const std::filesystem::path& root, std::int64_t keep);

}  // namespace cistron::io
