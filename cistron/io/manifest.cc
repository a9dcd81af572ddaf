#include "cistron/io/manifest.h"

#include <xxhash.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "cistron/base/error.h"
#include "cistron/io/json.h"

namespace cistron::io {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "cistron-checkpoint";
constexpr int kVersion = 1;
constexpr std::string_view kChecksumPrefix = "xxh3-64:";
// State nests as deep as a run's configuration does; the manifest itself five levels.
constexpr int kDepth = 64;

std::string ChecksumText(std::uint64_t checksum) {
  return fmt::format("{}{:016x}", kChecksumPrefix, checksum);
}

json ToArray(const Shape& shape) {
  return std::vector<std::int64_t>(shape.begin(), shape.end());
}

// The checksum of a document without its own "checksum" member. Keys are sorted and numbers are
// written in the shortest form that reads back, so a document that was parsed has the same text.
std::string DocumentChecksum(const json& document) {
  const std::string text = DumpJson(document);
  return ChecksumText(Checksum(text.data(), text.size()));
}

class ManifestParser {
 public:
  ManifestParser(const std::string& origin, Cover cover) : origin_(origin), cover_(cover) {}

  Manifest Parse(std::string_view text) {
    json document = ParseJson(text, origin_, kDepth);
    if (!document.is_object() || document.value("format", json()) != kFormat) {
      CISTRON_THROW(kBadInput, "{}: is not the manifest of a Cistron checkpoint", origin_);
    }
    if (const json version = document.value("version", json()); version != kVersion) {
      CISTRON_THROW(kUnsupported,
                    "{}: has version {} of the checkpoint format; this program reads "
                    "version {}",
                    origin_, DumpJson(version), kVersion);
    }
    const json checksum = Member(document, "checksum", "the manifest");
    document.erase("checksum");
    if (checksum != DocumentChecksum(document)) {
      CISTRON_THROW(kBadInput,
                    "{}: the manifest's checksum does not hold; the file was changed or is "
                    "damaged, use another checkpoint",
                    origin_);
    }
    Manifest manifest;
    manifest.step = Count(Member(document, "step", "the manifest"), "step");
    manifest.state_json = DumpJson(Member(document, "state", "the manifest"));
    for (const auto& [file, bytes] : Member(document, "files", "the manifest").items()) {
      if (file.empty() || file == "." || file == ".." ||
          file.find_first_of(std::string("/\\\0", 3)) != file.npos) {
        Fail("files", Quoted(file) + " is not a plain file name");
      }
      manifest.file_bytes[file] = static_cast<std::uint64_t>(Count(bytes, Quoted(file)));
    }
    for (const auto& [name, value] : Member(document, "tensors", "the manifest").items()) {
      manifest.tensors[name] = ParseTensor(Quoted(name), value, manifest);
    }
    return manifest;
  }

 private:
  [[noreturn]] void Fail(const std::string& what, const std::string& why) const {
    CISTRON_THROW(kBadInput, "{}: {}: {}", origin_, what, why);
  }

  const json& Member(const json& object, const char* key, const std::string& what) const {
    const auto it = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || it == object.end()) {
      Fail(what, fmt::format("has no \"{}\"", key));
    }
    return *it;
  }

  std::int64_t Count(const json& value, const std::string& what) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) {
      Fail(what, DumpJson(value) + " is not a count");
    }
    return value.get<std::int64_t>();
  }

  std::string Text(const json& value, const std::string& what) const {
    if (!value.is_string()) Fail(what, DumpJson(value) + " is not a string");
    return value.get<std::string>();
  }

  Shape ParseShape(const json& value, const std::string& what) const {
    if (!value.is_array()) Fail(what, DumpJson(value) + " is not a list of counts");
    std::vector<std::int64_t> dims;
    for (const json& dim : value) dims.push_back(Count(dim, what));
    try {
      return Shape(dims);
    } catch (const Error& e) {
      Fail(what, e.message());
    }
  }

  std::uint64_t ParseChecksum(const std::string& text, const std::string& what) const {
    std::uint64_t value = 0;
    const char* begin = text.data() + std::min(text.size(), kChecksumPrefix.size());
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(begin, end, value, 16);
    if (!text.starts_with(kChecksumPrefix) || error != std::errc() || stop != end) {
      Fail(what, Quoted(text) + " is not a checksum");
    }
    return value;
  }

  ManifestTensor ParseTensor(const std::string& what, const json& value,
                             const Manifest& manifest) const {
    ManifestTensor tensor;
    const std::string dtype = Text(Member(value, "dtype", what), what);
    const std::optional<DType> known = FromSafetensorsName(dtype);
    if (!known) Fail(what, "unknown dtype " + Quoted(dtype));
    tensor.dtype = *known;
    tensor.shape = ParseShape(Member(value, "shape", what), what);
    std::vector<Box> boxes;
    for (const json& entry : Member(value, "boxes", what)) {
      StoredBox stored;
      stored.box.start = ParseShape(Member(entry, "start", what), what);
      stored.box.size = ParseShape(Member(entry, "size", what), what);
      stored.file = Text(Member(entry, "file", what), what);
      stored.key = Text(Member(entry, "key", what), what);
      stored.checksum = ParseChecksum(Text(Member(entry, "checksum", what), what), what);
      if (!manifest.file_bytes.contains(stored.file)) {
        Fail(what, "lies in " + Quoted(stored.file) + ", which \"files\" does not list");
      }
      boxes.push_back(stored.box);
      tensor.boxes.push_back(std::move(stored));
    }
    const std::string problem =
        cover_ == Cover::kWhole ? ExplainCover(tensor.shape, boxes) : std::string();
    if (!problem.empty()) Fail(what, problem);
    return tensor;
  }

  const std::string& origin_;
  Cover cover_;
};

}  // namespace

std::uint64_t Checksum(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}

std::string ToJson(const Manifest& manifest) {
  json document;
  document["format"] = kFormat;
  document["version"] = kVersion;
  document["step"] = manifest.step;
  try {
    document["state"] = ParseJson(manifest.state_json, "the state", kDepth - 1);
  } catch (const Error& e) {
    CISTRON_THROW(kInvalidArgument, "SaveCheckpoint: {}", e.message());
  }
  document["files"] = json::object();
  for (const auto& [file, bytes] : manifest.file_bytes) document["files"][file] = bytes;
  document["tensors"] = json::object();
  for (const auto& [name, tensor] : manifest.tensors) {
    json boxes = json::array();
    for (const StoredBox& stored : tensor.boxes) {
      boxes.push_back({{"start", ToArray(stored.box.start)},
                       {"size", ToArray(stored.box.size)},
                       {"file", stored.file},
                       {"key", stored.key},
                       {"checksum", ChecksumText(stored.checksum)}});
    }
    document["tensors"][name] = {{"dtype", SafetensorsName(tensor.dtype)},
                                 {"shape", ToArray(tensor.shape)},
                                 {"boxes", boxes}};
  }
  document["checksum"] = DocumentChecksum(document);
  return DumpJson(document, 1) + "\n";
}

Manifest ParseManifest(std::string_view text, const std::string& origin, Cover cover) {
  return ManifestParser(origin, cover).Parse(text);
}

void Merge(const Manifest& part, Manifest& into) {
  for (const auto& [name, tensor] : part.tensors) {
    const auto [it, is_new] = into.tensors.try_emplace(name, tensor);
    if (is_new) continue;
    ManifestTensor& joined = it->second;
    CISTRON_CHECK(joined.dtype == tensor.dtype && joined.shape == tensor.shape,
                  "SaveCheckpoint: boxes of {} disagree: {} {} after {} {}", Quoted(name),
                  Name(tensor.dtype), ToString(tensor.shape), Name(joined.dtype),
                  ToString(joined.shape));
    joined.boxes.insert(joined.boxes.end(), tensor.boxes.begin(), tensor.boxes.end());
  }
  for (const auto& [file, bytes] : part.file_bytes) {
    CISTRON_CHECK(into.file_bytes.emplace(file, bytes).second,
                  "SaveCheckpoint: {} was written twice", file);
  }
}

void CheckCover(const Manifest& manifest) {
  for (const auto& [name, tensor] : manifest.tensors) {
    std::vector<Box> stored;
    for (const StoredBox& box : tensor.boxes) stored.push_back(box.box);
    const std::string problem = ExplainCover(tensor.shape, stored);
    CISTRON_CHECK(problem.empty(), "SaveCheckpoint: {}: {}", Quoted(name), problem);
  }
}

}  // namespace cistron::io
