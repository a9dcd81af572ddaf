// Fuzz target: whatever bytes come as the manifest of a checkpoint, the answer is an Error or a
// manifest whose boxes hold each tensor once and which can be written and read again.
// tests/fuzz/manifest holds the cases found.
#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "cistron/base/error.h"
#include "cistron/io/json.h"
#include "cistron/io/manifest.h"

namespace {

using namespace cistron::io;

void Check(bool ok) {
  if (!ok) __builtin_trap();
}

void Parse(const std::string& text) {
  Manifest manifest;
  try {
    manifest = ParseManifest(text, "fuzz");
  } catch (const cistron::Error&) {
    return;
  }
  // What was accepted holds: nothing below may throw.
  Check(manifest.step >= 0);
  for (const auto& [file, bytes] : manifest.file_bytes) {
    Check(!file.empty() && file.find('/') == file.npos && file != "..");
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    std::int64_t elements = 0;
    for (const StoredBox& stored : tensor.boxes) {
      Check(IsInside(stored.box, tensor.shape) && manifest.file_bytes.contains(stored.file));
      elements += stored.box.size.numel();
    }
    Check(elements == tensor.shape.numel());
  }
  const std::string written = ToJson(manifest);
  Check(ToJson(ParseManifest(written, "fuzz")) == written);
}

// No input gets past the checksum by chance: the right one is put in its place.
std::string WithChecksum(const std::string& text) {
  try {
    nlohmann::json document = ParseJson(text, "fuzz", 64);
    if (!document.is_object()) return text;
    document.erase("checksum");
    const std::string unsigned_text = DumpJson(document);
    document["checksum"] =
        fmt::format("xxh3-64:{:016x}", Checksum(unsigned_text.data(), unsigned_text.size()));
    return DumpJson(document);
  } catch (const cistron::Error&) {
    return text;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  Parse(text);
  Parse(WithChecksum(text));
  return 0;
}
