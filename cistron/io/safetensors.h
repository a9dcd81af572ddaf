// The safetensors format: a header of names, dtypes, shapes and byte ranges in JSON, then the data.
//
// Reading trusts nothing: every length, offset, shape and dtype is checked against the file before use, and
// each failure names the file, the tensor and the value. Format: 8 bytes little-endian header length, the
// header, the data; ranges are relative to the end of the header, do not overlap and leave no hole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::io {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;
};

// A file opened for reading (memory-mapped). Throws kNotFound, kIo or kBadInput.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::filesystem::path& path() const;
  const std::vector<TensorEntry>& entries() const;  // in order of their offsets
  const std::map<std::string, std::string>& metadata() const;
  const TensorEntry* Find(const std::string& name) const;  // null when absent
  // The bytes of an entry, inside the mapping.
  std::span<const std::byte> Bytes(const TensorEntry& entry) const;
  // A copy as a host tensor. Throws kNotFound with the nearest names.
  Tensor Read(const std::string& name) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous, host
};

// Parses and checks a header alone (for the fuzzer): `header` is the JSON, `data_bytes` what follows it.
std::vector<TensorEntry> ParseSafetensorsHeader(std::span<const char> header,
                                                std::uint64_t data_bytes,
                                                const std::string& file_name,
                                                std::map<std::string, std::string>* metadata);

// Writes a file (not atomically: callers write into a temporary directory). Tensors are stored in the order
// given, aligned to 8 bytes by padding the header. Does fsync. Throws kIo with the path and errno's text.
void WriteSafetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace cistron::io
