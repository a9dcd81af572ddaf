// Golden values under tests/golden, read without the library's own safetensors code: a fault in
// that code cannot hide behind itself.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cistron/tensor/tensor.h"

namespace cistron::testing {

// A safetensors file held in memory.
class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path);

  bool Has(const std::string& name) const { return tensors_.count(name) != 0; }
  // Throws kNotFound with the name.
  const Tensor& Get(const std::string& name) const;
  // Every name that begins with `prefix`, sorted.
  std::vector<std::string> Names(const std::string& prefix = {}) const;

 private:
  std::string path_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace cistron::testing
