// Fuzz target: whatever bytes come as a safetensors file, header or index, the answer is an Error
// or a file whose every tensor can be read. tests/fuzz/safetensors holds the cases found.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "cistron/base/error.h"
#include "cistron/io/safetensors.h"

namespace {

using cistron::Error;

// As a file in memory, opened as a file on disk is.
void OpenAsFile(const std::uint8_t* data, std::size_t size) {
  const int fd = memfd_create("safetensors", 0);
  if (fd < 0 || write(fd, data, size) != static_cast<ssize_t>(size)) __builtin_trap();
  try {
    const cistron::io::SafetensorsFile file("/proc/self/fd/" + std::to_string(fd));
    std::uint64_t bytes = 0;
    for (const auto& entry : file.entries()) {
      bytes += static_cast<std::uint64_t>(file.Read(entry.name).bytes());
    }
    // The tensors fill the file: nothing is read twice, nothing is left.
    if (bytes + 8 > file.file_bytes()) __builtin_trap();
  } catch (const Error&) {
  }
  close(fd);
}

// As a header alone: most inputs get no further than the length of a file's header.
void ParseAsHeader(const std::uint8_t* data, std::size_t size) {
  std::uint64_t data_bytes = 0;
  if (size < sizeof(data_bytes)) return;
  std::memcpy(&data_bytes, data, sizeof(data_bytes));
  try {
    std::map<std::string, std::string> metadata;
    const auto entries = cistron::io::ParseSafetensorsHeader(
        {reinterpret_cast<const char*>(data) + sizeof(data_bytes), size - sizeof(data_bytes)},
        data_bytes, "fuzz", &metadata);
    std::uint64_t end = 0;
    for (const auto& entry : entries) {
      if (entry.begin != end || entry.end > data_bytes) __builtin_trap();
      end = entry.end;
    }
  } catch (const Error&) {
  }
}

void ParseAsIndex(const std::uint8_t* data, std::size_t size) {
  try {
    const auto index =
        cistron::io::ParseSafetensorsIndex({reinterpret_cast<const char*>(data), size}, "fuzz");
    const auto again = cistron::io::ParseSafetensorsIndex(cistron::io::ToJson(index), "fuzz");
    if (again.weight_map != index.weight_map || again.total_size != index.total_size) {
      __builtin_trap();
    }
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  OpenAsFile(data, size);
  ParseAsHeader(data, size);
  ParseAsIndex(data, size);
  return 0;
}
