#include "cistron/testing/golden_file.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace cistron::testing {

GoldenFile::GoldenFile(const std::filesystem::path& path) : path_(path.string()) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t header_size = 0;
  file.read(reinterpret_cast<char*>(&header_size), sizeof(header_size));
  CISTRON_CHECK(file, "golden file {}: cannot be read", path_);
  std::string header(header_size, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_size));
  const std::streamoff data_start = file.tellg();
  const nlohmann::json entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const auto dtype = FromSafetensorsName(entry.at("dtype").get<std::string>());
    CISTRON_CHECK(dtype, "golden file {}: {} has an unknown dtype", path_, name);
    const auto dims = entry.at("shape").get<std::vector<std::int64_t>>();
    Tensor tensor = Tensor::Empty(Shape(dims), *dtype);
    file.seekg(data_start + entry.at("data_offsets").at(0).get<std::streamoff>());
    file.read(static_cast<char*>(tensor.raw()), tensor.bytes());
    CISTRON_CHECK(file, "golden file {}: {} is truncated", path_, name);
    tensors_.emplace(name, std::move(tensor));
  }
}

const Tensor& GoldenFile::Get(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) CISTRON_THROW(kNotFound, "golden file {}: no '{}'", path_, name);
  return found->second;
}

std::vector<std::string> GoldenFile::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  for (auto it = tensors_.lower_bound(prefix);
       it != tensors_.end() && it->first.compare(0, prefix.size(), prefix) == 0; ++it) {
    names.push_back(it->first);
  }
  return names;
}

}  // namespace cistron::testing
