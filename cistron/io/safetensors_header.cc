// The JSON of the safetensors format: headers and indices.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <tuple>

#include "cistron/io/json.h"
#include "cistron/io/safetensors.h"
#include "cistron/io/safetensors_header.h"

namespace cistron::io {
namespace {

using nlohmann::json;

// Types of the format that Cistron has no use for: a file may be sound and hold them.
constexpr std::array<std::string_view, 15> kOtherDTypes = {
    "BOOL", "I8",      "U16",     "I16",         "U32",         "U64",     "C64",
    "F4",   "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E3M4", "F8_E4M3B11FNUZ",
    "C128"};

class EntryParser {
 public:
  EntryParser(const std::string& file, const std::string& name) : file_(file), name_(name) {}

  TensorEntry Parse(const json& value, std::uint64_t data_bytes) const {
    if (!value.is_object()) Fail("its entry is {}, not an object", Excerpt(value));
    for (const auto& [key, unused] : value.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        Fail("unknown key {} in its entry", Quoted(key));
      }
    }
    TensorEntry entry;
    entry.name = name_;
    entry.dtype = ParseDType(Member(value, "dtype"));
    entry.shape = ParseShape(Member(value, "shape"));
    std::tie(entry.begin, entry.end) = ParseOffsets(Member(value, "data_offsets"));
    const std::uint64_t stored = entry.end - entry.begin;
    std::uint64_t needed = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(entry.shape.numel()),
                               std::uint64_t{SizeOf(entry.dtype)}, &needed) ||
        needed != stored) {
      Fail("{} {} does not fill data_offsets [{}, {}], which are {} bytes",
           SafetensorsName(entry.dtype), ToString(entry.shape), entry.begin, entry.end, stored);
    }
    if (entry.end > data_bytes) {
      Fail("data_offsets end at {}, but the file holds {} bytes of data", entry.end, data_bytes);
    }
    return entry;
  }

 private:
  template <class... Args>
  [[noreturn]] void Fail(fmt::format_string<Args...> format, Args&&... args) const {
    CISTRON_THROW(kBadInput, "{}: tensor {}: {}; the file is damaged, copy or download it again",
                  file_, Quoted(name_), fmt::vformat(format, fmt::make_format_args(args...)));
  }

  const json& Member(const json& value, const char* key) const {
    const auto it = value.find(key);
    if (it == value.end()) Fail("no {} in its entry", key);
    return *it;
  }

  DType ParseDType(const json& value) const {
    if (!value.is_string()) Fail("dtype is {}, not a string", Excerpt(value));
    const std::string& text = value.get_ref<const std::string&>();
    const std::optional<DType> dtype = FromSafetensorsName(text);
    if (dtype) return *dtype;
    if (std::find(kOtherDTypes.begin(), kOtherDTypes.end(), text) != kOtherDTypes.end()) {
      CISTRON_THROW(kUnsupported,
                    "{}: tensor {}: dtype {} is not one that Cistron reads; convert "
                    "the tensor to F32, BF16 or I64",
                    file_, Quoted(name_), text);
    }
    Fail("unknown dtype {}", Quoted(text));
  }

  Shape ParseShape(const json& value) const {
    if (!value.is_array()) Fail("shape is {}, not an array", Excerpt(value));
    if (value.size() > Shape::kMaxRank) {
      Fail("{} dimensions; at most {} are supported", value.size(),
           static_cast<int>(Shape::kMaxRank));
    }
    std::vector<std::int64_t> dims;
    std::int64_t product = 1;
    for (const json& dim : value) {
      if (!dim.is_number_unsigned() || dim.get<std::uint64_t>() > INT64_MAX) {
        Fail("shape {} has a dimension that is no count", Excerpt(value));
      }
      dims.push_back(dim.get<std::int64_t>());
      // Zero dimensions are left out of the product, as Shape does: [0, 2^62, 4] is refused too.
      if (dims.back() != 0 && __builtin_mul_overflow(product, dims.back(), &product)) {
        Fail("the product of shape {} exceeds 2^63 - 1", Excerpt(value));
      }
    }
    return Shape(dims);
  }

  std::pair<std::uint64_t, std::uint64_t> ParseOffsets(const json& value) const {
    if (!value.is_array() || value.size() != 2 || !value[0].is_number_unsigned() ||
        !value[1].is_number_unsigned()) {
      Fail("data_offsets {} are not two counts of bytes", Excerpt(value));
    }
    const auto begin = value[0].get<std::uint64_t>();
    const auto end = value[1].get<std::uint64_t>();
    if (begin > end) Fail("data_offsets [{}, {}] end before they begin", begin, end);
    return {begin, end};
  }

  const std::string& file_;
  const std::string& name_;
};

void ParseMetadata(const json& value, const std::string& file,
                   std::map<std::string, std::string>* metadata) {
  if (!value.is_object()) {
    CISTRON_THROW(kBadInput, "{}: __metadata__ is {}, not an object", file, Excerpt(value));
  }
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      CISTRON_THROW(kBadInput, "{}: __metadata__ {} is {}, not a string", file, Quoted(key),
                    Excerpt(text));
    }
    if (metadata != nullptr) (*metadata)[key] = text.get<std::string>();
  }
}

// Ranges one after another, from the first byte of the data to the last.
void CheckCover(const std::vector<TensorEntry>& entries, std::uint64_t data_bytes,
                const std::string& file) {
  std::uint64_t position = 0;
  const TensorEntry* previous = nullptr;
  for (const TensorEntry& entry : entries) {
    if (entry.begin < position) {
      CISTRON_THROW(kBadInput,
                    "{}: tensors {} (data_offsets [{}, {}]) and {} ([{}, {}]) overlap; "
                    "the file is damaged, copy or download it again",
                    file, Quoted(previous->name), previous->begin, previous->end,
                    Quoted(entry.name), entry.begin, entry.end);
    }
    if (entry.begin > position) {
      CISTRON_THROW(kBadInput,
                    "{}: bytes {} to {} of the data, before tensor {}, belong to no "
                    "tensor; the file is damaged, copy or download it again",
                    file, position, entry.begin, Quoted(entry.name));
    }
    position = entry.end;
    previous = &entry;
  }
  if (position != data_bytes) {
    CISTRON_THROW(kBadInput,
                  "{}: the tensors end at byte {}, but {} bytes of data follow the "
                  "header; the file is damaged, copy or download it again",
                  file, position, data_bytes);
  }
}

}  // namespace

std::vector<TensorEntry> ParseSafetensorsHeader(std::span<const char> header,
                                                std::uint64_t data_bytes,
                                                const std::string& file_name,
                                                std::map<std::string, std::string>* metadata) {
  // name -> {dtype, shape: [...], data_offsets: [...]}: three levels.
  constexpr int kDepth = 4;
  const json document =
      ParseJson({header.data(), header.size()}, file_name + " (safetensors header)", kDepth);
  if (!document.is_object()) {
    CISTRON_THROW(kBadInput, "{}: the safetensors header is {}, not an object", file_name,
                  Excerpt(document));
  }
  std::vector<TensorEntry> entries;
  for (const auto& [name, value] : document.items()) {
    if (name == "__metadata__") {
      ParseMetadata(value, file_name, metadata);
    } else {
      entries.push_back(EntryParser(file_name, name).Parse(value, data_bytes));
    }
  }
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  CheckCover(entries, data_bytes, file_name);
  return entries;
}

std::string BuildSafetensorsHeader(std::span<const SafetensorsWriter::Spec> specs,
                                   const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + DumpJson(json(metadata));
  std::uint64_t offset = 0;
  for (const SafetensorsWriter::Spec& spec : specs) {
    const std::uint64_t end =
        offset + static_cast<std::uint64_t>(spec.shape.numel()) * SizeOf(spec.dtype);
    if (text.size() > 1) text += ",";
    text += DumpJson(json(spec.name));
    text += fmt::format(
        ":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", SafetensorsName(spec.dtype),
        DumpJson(json(std::vector(spec.shape.begin(), spec.shape.end()))), offset, end);
    offset = end;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

SafetensorsIndex ParseSafetensorsIndex(std::string_view text, const std::string& origin) {
  const json document = ParseJson(text, origin, /*max_depth=*/8);
  const auto map = document.is_object() ? document.find("weight_map") : document.end();
  if (!document.is_object() || map == document.end() || !map->is_object()) {
    CISTRON_THROW(kBadInput,
                  "{}: has no object \"weight_map\", so it is not an index of safetensors "
                  "files",
                  origin);
  }
  SafetensorsIndex index;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string()) {
      CISTRON_THROW(kBadInput, "{}: weight_map {} is {}, not a file name", origin, Quoted(name),
                    Excerpt(file));
    }
    const std::string& file_name = file.get_ref<const std::string&>();
    // Shards lie beside their index: a path would let a file reach anywhere.
    if (file_name.empty() || file_name == "." || file_name == ".." ||
        file_name.find_first_of(std::string("/\\\0", 3)) != file_name.npos) {
      CISTRON_THROW(kBadInput, "{}: weight_map {} names {}, which is not a plain file name", origin,
                    Quoted(name), Quoted(file_name));
    }
    index.weight_map[name] = file_name;
  }
  if (const auto extra = document.find("metadata"); extra != document.end() && extra->is_object()) {
    const auto size = extra->find("total_size");
    if (size != extra->end() && size->is_number()) {
      // Some writers store it as a floating-point number.
      if (size->is_number_unsigned()) {
        index.total_size = size->get<std::uint64_t>();
      } else if (size->is_number_float() && size->get<double>() >= 0 &&
                 size->get<double>() < 9e18) {
        index.total_size = static_cast<std::uint64_t>(size->get<double>());
      } else {
        CISTRON_THROW(kBadInput, "{}: total_size is {}, not a count of bytes", origin,
                      Excerpt(*size));
      }
    }
  }
  return index;
}

std::string ToJson(const SafetensorsIndex& index) {
  json document;
  document["metadata"] = json::object();
  if (index.total_size) document["metadata"]["total_size"] = *index.total_size;
  document["weight_map"] = index.weight_map;
  return DumpJson(document, 2) + "\n";
}

}  // namespace cistron::io
