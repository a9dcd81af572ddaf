#include "cistron/io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <system_error>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/text.h"
#include "cistron/io/file.h"
#include "cistron/io/json.h"
#include "cistron/io/safetensors_header.h"

namespace cistron::io {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian");

// As the format's own library: a header beyond this is damage, not data.
constexpr std::uint64_t kLargestHeader = 100'000'000;

}  // namespace

struct SafetensorsFile::State {
  std::filesystem::path path;
  const std::byte* mapping = nullptr;
  std::size_t size = 0;
  std::size_t data_begin = 0;
  std::vector<TensorEntry> entries;
  std::unordered_map<std::string, std::size_t> by_name;
  std::map<std::string, std::string> metadata;

  ~State() {
    if (mapping != nullptr) ::munmap(const_cast<std::byte*>(mapping), size);
  }

  void Map() {
    const std::string name = path.string();
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
      if (errno == ENOENT || errno == ENOTDIR) CISTRON_THROW(kNotFound, "{}: no such file", name);
      CISTRON_THROW(kIo, "{}: cannot open: {}", name, std::generic_category().message(errno));
    }
    struct stat status = {};
    if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(fd);
      CISTRON_THROW(kBadInput, "{}: is not a regular file, so not a safetensors file", name);
    }
    size = static_cast<std::size_t>(status.st_size);
    if (size < 8) {
      ::close(fd);
      CISTRON_THROW(kBadInput,
                    "{}: {} bytes are too few for a safetensors file; it is truncated or "
                    "of another kind",
                    name, size);
    }
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (address == MAP_FAILED) {
      CISTRON_THROW(kIo, "{}: cannot map into memory: {}", name,
                    std::generic_category().message(error));
    }
    mapping = static_cast<const std::byte*>(address);
  }
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.path = path;
  s.Map();
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, s.mapping, sizeof(header_bytes));
  if (header_bytes > kLargestHeader) {
    CISTRON_THROW(kBadInput,
                  "{}: a header of {} bytes is announced, more than {}: the file is damaged "
                  "or not a safetensors file",
                  path.string(), header_bytes, kLargestHeader);
  }
  if (header_bytes > s.size - 8) {
    CISTRON_THROW(kBadInput,
                  "{}: a header of {} bytes is announced, but the file has {} bytes in all; "
                  "it is truncated, copy or download it again",
                  path.string(), header_bytes, s.size);
  }
  s.data_begin = 8 + static_cast<std::size_t>(header_bytes);
  const std::span<const char> header(reinterpret_cast<const char*>(s.mapping) + 8,
                                     static_cast<std::size_t>(header_bytes));
  s.entries = ParseSafetensorsHeader(header, s.size - s.data_begin, path.string(), &s.metadata);
  for (std::size_t i = 0; i < s.entries.size(); ++i) s.by_name[s.entries[i].name] = i;
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::filesystem::path& SafetensorsFile::path() const {
  return state_->path;
}
std::uint64_t SafetensorsFile::file_bytes() const {
  return state_->size;
}
const std::vector<TensorEntry>& SafetensorsFile::entries() const {
  return state_->entries;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return state_->metadata;
}

const TensorEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = state_->by_name.find(name);
  return it == state_->by_name.end() ? nullptr : &state_->entries[it->second];
}

const TensorEntry& SafetensorsFile::At(const std::string& name) const {
  if (const TensorEntry* entry = Find(name)) return *entry;
  std::string hint = "; it holds no tensor at all";
  int best = std::numeric_limits<int>::max();
  for (const TensorEntry& entry : state_->entries) {
    const int distance = EditDistance(name, entry.name);
    if (distance >= best) continue;
    best = distance;
    hint = fmt::format("; the nearest name is {}", Quoted(entry.name));
  }
  CISTRON_THROW(kNotFound, "{}: holds no tensor {}{}", path().string(), Quoted(name), hint);
}

std::span<const std::byte> SafetensorsFile::Bytes(const TensorEntry& entry) const {
  return {state_->mapping + state_->data_begin + entry.begin,
          static_cast<std::size_t>(entry.end - entry.begin)};
}

Tensor SafetensorsFile::Read(const std::string& name) const {
  const TensorEntry& entry = At(name);
  const std::span<const std::byte> bytes = Bytes(entry);
  Tensor tensor = Tensor::Empty(entry.shape, entry.dtype);
  if (!bytes.empty()) std::memcpy(tensor.raw(), bytes.data(), bytes.size());
  return tensor;
}

struct SafetensorsWriter::State {
  FileWriter writer;
  std::string file;
  std::vector<Spec> specs;
  std::size_t next = 0;
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const Spec> specs,
                                     const std::map<std::string, std::string>& metadata) {
  std::unordered_set<std::string> names;
  for (const Spec& spec : specs) {
    CISTRON_CHECK(spec.name != "__metadata__" && names.insert(spec.name).second,
                  "SafetensorsWriter: {}: the tensor name {} is reserved or appears twice",
                  path.string(), Quoted(spec.name));
  }
  const std::string header = BuildSafetensorsHeader(specs, metadata);
  const std::uint64_t header_bytes = header.size();
  state_.reset(new State{FileWriter(path), path.string(), {specs.begin(), specs.end()}});
  state_->writer.Write(&header_bytes, sizeof(header_bytes));
  state_->writer.Write(header);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::Append(const Tensor& tensor) {
  State& s = *state_;
  CISTRON_CHECK(s.next < s.specs.size(),
                "SafetensorsWriter: {}: all {} tensors were written already", s.file,
                s.specs.size());
  const Spec& spec = s.specs[s.next++];
  CISTRON_CHECK(tensor && tensor.dtype() == spec.dtype && tensor.shape() == spec.shape &&
                    tensor.IsContiguous() && tensor.device().type == DeviceType::kCpu,
                "SafetensorsWriter: {}: tensor {} must be contiguous in host memory, {} {}, not {}",
                s.file, Quoted(spec.name), Name(spec.dtype), ToString(spec.shape),
                Describe(tensor));
  s.writer.Write(tensor.raw(), static_cast<std::size_t>(tensor.bytes()));
}

void SafetensorsWriter::Finish() {
  CISTRON_CHECK(state_->next == state_->specs.size(),
                "SafetensorsWriter: {}: {} of {} tensors were written", state_->file, state_->next,
                state_->specs.size());
  state_->writer.Close();
}

void WriteSafetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Spec> specs;
  for (const NamedTensor& t : tensors) {
    CISTRON_CHECK(t.tensor, "WriteSafetensors: {}: tensor {} is undefined", path.string(),
                  Quoted(t.name));
    specs.push_back({t.name, t.tensor.dtype(), t.tensor.shape()});
  }
  SafetensorsWriter writer(path, specs, metadata);
  for (const NamedTensor& t : tensors) writer.Append(t.tensor);
  writer.Finish();
}

}  // namespace cistron::io
