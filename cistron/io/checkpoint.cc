#include "cistron/io/checkpoint.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/io/box.h"
#include "cistron/io/file.h"
#include "cistron/io/json.h"
#include "cistron/io/manifest.h"
#include "cistron/io/safetensors.h"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifestFile = "manifest.json";

std::string DataFile(int rank) {
  return fmt::format("rank-{:05}.safetensors", rank);
}

// Enters the boxes in a manifest, checked, and returns what the data file will hold.
std::vector<SafetensorsWriter::Spec> Register(std::span<const CheckpointBox> boxes,
                                              const std::string& file, Manifest& manifest) {
  std::vector<SafetensorsWriter::Spec> specs;
  for (const CheckpointBox& box : boxes) {
    CISTRON_CHECK(box.tensor && box.tensor.IsContiguous(),
                  "SaveCheckpoint: {} must be contiguous, not {}", Quoted(box.name),
                  Describe(box.tensor));
    ManifestTensor& tensor = manifest.tensors[box.name];
    if (tensor.boxes.empty()) {
      tensor.dtype = box.tensor.dtype();
      tensor.shape = box.global_shape;
    }
    CISTRON_CHECK(tensor.dtype == box.tensor.dtype() && tensor.shape == box.global_shape,
                  "SaveCheckpoint: boxes of {} disagree: {} of a global {} after {} {}",
                  Quoted(box.name), Describe(box.tensor), ToString(box.global_shape),
                  Name(tensor.dtype), ToString(tensor.shape));
    StoredBox stored;
    stored.box = {box.start, box.tensor.shape()};
    stored.file = file;
    // Names are unique in a file; the further boxes of a tensor are told apart by their number.
    stored.key =
        tensor.boxes.empty() ? box.name : fmt::format("{}#{}", box.name, tensor.boxes.size());
    // One tensor of a device at a time is on the host, here and when it is written.
    const Tensor host = box.tensor.ToHost();
    stored.checksum = Checksum(host.raw(), static_cast<std::size_t>(host.bytes()));
    specs.push_back({stored.key, box.tensor.dtype(), box.tensor.shape()});
    tensor.boxes.push_back(std::move(stored));
  }
  return specs;
}

// What one rank writes: checked first, then written.
struct Part {
  Part(int rank, std::span<const CheckpointBox> boxes)
      : file(DataFile(rank)), specs(Register(boxes, file, manifest)) {}

  void Write(const fs::path& directory, std::span<const CheckpointBox> boxes) {
    if (boxes.empty()) return;
    SafetensorsWriter writer(directory / file, specs, {});
    for (const CheckpointBox& box : boxes) writer.Append(box.tensor.ToHost());
    writer.Finish();
    manifest.file_bytes[file] = fs::file_size(directory / file);
  }

  Manifest manifest;
  std::string file;
  std::vector<SafetensorsWriter::Spec> specs;
};

}  // namespace

struct CheckpointWriter::State {
  State(const fs::path& root, std::int64_t number)
      : step(number), path(root / fmt::format("step-{:08}", number)), directory(path) {}

  fs::path Commit(Manifest manifest, const std::string& state_json) {
    CheckCover(manifest);
    manifest.step = step;
    manifest.state_json = state_json;
    WriteNewFile(directory.path() / kManifestFile, ToJson(manifest));
    directory.Commit(/*replace=*/true);
    return path;
  }

  std::int64_t step;
  fs::path path;
  AtomicDirectory directory;
};

CheckpointWriter::CheckpointWriter(const fs::path& root, std::int64_t step) {
  CISTRON_CHECK(step >= 0, "SaveCheckpoint: step {} is negative", step);
  RemoveStaleTemporaries(root);
  state_ = std::make_unique<State>(root, step);
}
CheckpointWriter::~CheckpointWriter() = default;

const fs::path& CheckpointWriter::directory() const {
  return state_->directory.path();
}

fs::path CheckpointWriter::Commit(std::span<const std::string> parts,
                                  const std::string& state_json) {
  Manifest manifest;
  for (const std::string& part : parts) {
    Merge(ParseManifest(part, "a part of the checkpoint", Cover::kPart), manifest);
  }
  return state_->Commit(std::move(manifest), state_json);
}

std::string WriteCheckpointPart(const fs::path& directory, int rank,
                                std::span<const CheckpointBox> boxes) {
  Part part(rank, boxes);
  part.Write(directory, boxes);
  return ToJson(part.manifest);
}

fs::path SaveCheckpoint(const fs::path& root, std::int64_t step,
                        std::span<const CheckpointBox> boxes, const std::string& state_json) {
  // A state that is no JSON is refused before anything is written.
  ToJson(Manifest{.step = step, .state_json = state_json, .tensors = {}, .file_bytes = {}});
  CISTRON_CHECK(step >= 0, "SaveCheckpoint: step {} is negative", step);
  Part part(0, boxes);
  CheckCover(part.manifest);
  RemoveStaleTemporaries(root);
  CheckpointWriter::State writer(root, step);
  part.Write(writer.directory.path(), boxes);
  return writer.Commit(std::move(part.manifest), state_json);
}

struct CheckpointReader::State {
  fs::path directory;
  Manifest manifest;
  std::map<std::string, SafetensorsFile> files;
  // Boxes whose checksum was found to hold: each is computed once.
  std::map<const StoredBox*, bool> verified;

  // The bytes of a stored box, its checksum verified.
  std::span<const std::byte> Verified(const std::string& name, const StoredBox& stored) {
    const SafetensorsFile& file = files.at(stored.file);
    const std::span<const std::byte> bytes = file.Bytes(file.At(stored.key));
    if (!verified[&stored]) {
      if (Checksum(bytes.data(), bytes.size()) != stored.checksum) {
        CISTRON_THROW(kBadInput,
                      "{}: the checksum of {} {} does not hold; the file is damaged, use "
                      "another checkpoint",
                      file.path().string(), Quoted(name), ToString(stored.box));
      }
      verified[&stored] = true;
    }
    return bytes;
  }

  void OpenFiles() {
    for (const auto& [name, bytes] : manifest.file_bytes) {
      const auto [it, unused] = files.emplace(name, SafetensorsFile(directory / name));
      if (it->second.file_bytes() != bytes) {
        CISTRON_THROW(kBadInput,
                      "{}: has {} bytes, the manifest says {}; the file is damaged, use "
                      "another checkpoint",
                      (directory / name).string(), it->second.file_bytes(), bytes);
      }
    }
    std::size_t boxes = 0, entries = 0;
    for (const auto& [name, tensor] : manifest.tensors) {
      for (const StoredBox& stored : tensor.boxes) {
        const TensorEntry& entry = files.at(stored.file).At(stored.key);
        if (entry.dtype != tensor.dtype || entry.shape != stored.box.size) {
          CISTRON_THROW(kBadInput, "{}: {} is {} {}, but the manifest says {} {}",
                        (directory / stored.file).string(), Quoted(stored.key), Name(entry.dtype),
                        cistron::ToString(entry.shape), Name(tensor.dtype),
                        cistron::ToString(stored.box.size));
        }
        ++boxes;
      }
    }
    for (const auto& [name, file] : files) entries += file.entries().size();
    if (boxes != entries) {
      CISTRON_THROW(kBadInput, "{}: its files hold {} tensors, but the manifest lists {} boxes",
                    directory.string(), entries, boxes);
    }
  }
};

CheckpointReader::CheckpointReader(const fs::path& directory) : state_(std::make_unique<State>()) {
  if (!fs::is_directory(directory)) {
    CISTRON_THROW(kNotFound, "{}: no such checkpoint directory", directory.string());
  }
  state_->directory = directory;
  const fs::path path = directory / kManifestFile;
  state_->manifest = ParseManifest(ReadFile(path), path.string());
  state_->OpenFiles();
}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;
CheckpointReader& CheckpointReader::operator=(CheckpointReader&&) noexcept = default;

const fs::path& CheckpointReader::directory() const {
  return state_->directory;
}
std::int64_t CheckpointReader::step() const {
  return state_->manifest.step;
}
const std::string& CheckpointReader::state_json() const {
  return state_->manifest.state_json;
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state_->manifest.tensors) names.push_back(name);
  return names;
}

std::optional<CheckpointReader::Info> CheckpointReader::Find(const std::string& name) const {
  const auto it = state_->manifest.tensors.find(name);
  if (it == state_->manifest.tensors.end()) return std::nullopt;
  return Info{it->second.dtype, it->second.shape,
              static_cast<std::int64_t>(it->second.boxes.size())};
}

Tensor CheckpointReader::Read(const std::string& name, const Shape& start,
                              const Shape& size) const {
  const auto it = state_->manifest.tensors.find(name);
  if (it == state_->manifest.tensors.end()) {
    CISTRON_THROW(kNotFound, "{}: holds no {}; it is a checkpoint of another model or layout",
                  state_->directory.string(), Quoted(name));
  }
  const ManifestTensor& tensor = it->second;
  const Box wanted = {start, size};
  CISTRON_CHECK(IsInside(wanted, tensor.shape), "CheckpointReader: box {} is not inside {}, {}",
                ToString(wanted), Quoted(name), cistron::ToString(tensor.shape));
  Tensor out = Tensor::Empty(size, tensor.dtype);
  for (const StoredBox& stored : tensor.boxes) {
    CopyIntersection(stored.box, state_->Verified(name, stored).data(), wanted,
                     static_cast<std::byte*>(out.raw()), SizeOf(tensor.dtype));
  }
  return out;
}

Tensor CheckpointReader::Read(const std::string& name) const {
  const std::optional<Info> info = Find(name);
  if (!info) return Read(name, {}, {});  // reports the name
  Shape start = info->global_shape;
  for (int d = 0; d < start.rank(); ++d) start[d] = 0;
  return Read(name, start, info->global_shape);
}

std::int64_t CheckpointReader::VerifyAll() const {
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : state_->manifest.tensors) {
    for (const StoredBox& stored : tensor.boxes) {
      bytes += static_cast<std::int64_t>(state_->Verified(name, stored).size());
    }
  }
  return bytes;
}

}  // namespace cistron::io
