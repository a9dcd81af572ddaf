// The safetensors format: a header of names, dtypes, shapes and byte ranges in JSON, then the data.
//
// Reading trusts nothing: every length, offset, shape and dtype is checked against the file before
// use, and each failure names the file, the tensor and the value. Format: 8 bytes little-endian
// header length, the header, the data; ranges are relative to the end of the header, do not overlap
// and leave no hole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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
  std::uint64_t file_bytes() const;
  const std::vector<TensorEntry>& entries() const;  // in order of their offsets
  const std::map<std::string, std::string>& metadata() const;
  const TensorEntry* Find(const std::string& name) const;  // null when absent
  // As Find, but throws kNotFound with the nearest name.
  const TensorEntry& At(const std::string& name) const;
  // The bytes of an entry, inside the mapping. They may lie at any address, aligned or not.
  std::span<const std::byte> Bytes(const TensorEntry& entry) const;
  // A copy as a host tensor. Throws kNotFound with the nearest name.
  Tensor Read(const std::string& name) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous, host
};

// Parses and checks a header alone (for the fuzzer): `header` is the JSON, `data_bytes` what
// follows it.
std::vector<TensorEntry> ParseSafetensorsHeader(std::span<const char> header,
                                                std::uint64_t data_bytes,
                                                const std::string& file_name,
                                                std::map<std::string, std::string>* metadata);

// The index of a model in several files, model.safetensors.index.json.
struct SafetensorsIndex {
  std::map<std::string, std::string> weight_map;  // tensor -> file name, a plain one
  std::optional<std::uint64_t> total_size;        // bytes of all tensors
};
SafetensorsIndex ParseSafetensorsIndex(std::string_view json, const std::string& origin);
std::string ToJson(const SafetensorsIndex& index);

// Writes a file tensor by tensor, so that a converted tensor need not outlive its write. Not
// atomic: callers write into an AtomicDirectory. Tensors lie in the order of `specs`, one after
// another; the header is padded so that the data begin at a multiple of 8 bytes. Throws kIo with
// the path and the reason.
class SafetensorsWriter {
 public:
  struct Spec {
    std::string name;
    DType dtype;
    Shape shape;
  };
  SafetensorsWriter(const std::filesystem::path& path, std::span<const Spec> specs,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();

  // The next tensor of `specs`: contiguous, host, of the shape and dtype announced.
  void Append(const Tensor& tensor);
  void Finish();  // fsync and close; every tensor must have been appended

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The same for tensors that are all at hand.
void WriteSafetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace cistron::io
