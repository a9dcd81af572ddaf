// SaveHuggingFace: what save_pretrained writes.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/io/file.h"
#include "cistron/model/hugging_face.h"
#include "cistron/model/published_layout.h"
#include "cistron/model/tokenizer_files.h"

namespace cistron::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGenerationConfig = "generation_config.json";
// Marks weights that PyTorch reads as they are; transformers asks for it.
const std::map<std::string, std::string> kMetadata = {{"format", "pt"}};

std::string_view TorchName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    default: break;
  }
  CISTRON_THROW(kInvalidArgument, "SaveHuggingFace: dtype {} is not one of f32, bf16, f16",
                Name(dtype));
}

// A tensor to write: part of a canonical one.
struct Item {
  FilePart part;
  ParameterInfo source;
};

// All tensors of the files, by name, as save_pretrained orders them.
std::vector<Item> CollectItems(const MixtralConfig& config, ExpertLayout layout) {
  std::vector<Item> items;
  for (const ParameterInfo& parameter : MixtralParameters(config)) {
    for (FilePart& part : FileParts(parameter, layout)) {
      items.push_back({std::move(part), parameter});
    }
  }
  std::sort(items.begin(), items.end(),
            [](const Item& a, const Item& b) { return a.part.name < b.part.name; });
  return items;
}

// Canonical tensors, the last few of which it keeps: files take turns between the two that hold a
// layer's experts.
class RecentTensors {
 public:
  explicit RecentTensors(const TensorSource& read) : read_(read) {}

  const Tensor& Get(const ParameterInfo& parameter) {
    for (const auto& [name, tensor] : recent_) {
      if (name == parameter.name) return tensor;
    }
    if (recent_.size() == kKept) recent_.pop_front();
    const Tensor& tensor = recent_.emplace_back(parameter.name, read_(parameter.name)).second;
    CISTRON_CHECK(tensor && IsFloat(tensor.dtype()) && tensor.shape() == parameter.shape &&
                      tensor.IsContiguous() && tensor.device().type == DeviceType::kCpu,
                  "SaveHuggingFace: tensor {} must be contiguous in host memory, of a float dtype "
                  "and shape {}, not {}",
                  parameter.name, ToString(parameter.shape), Describe(tensor));
    return tensor;
  }

 private:
  static constexpr std::size_t kKept = 2;
  const TensorSource& read_;
  std::deque<std::pair<std::string, Tensor>> recent_;
};

// Consecutive items until a file would exceed the limit; one tensor may exceed it alone.
std::vector<std::span<const Item>> CutShards(std::span<const Item> items, DType dtype,
                                             std::int64_t max_shard_bytes) {
  std::vector<std::span<const Item>> shards;
  std::size_t begin = 0;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::int64_t size =
        items[i].part.shape.numel() * static_cast<std::int64_t>(SizeOf(dtype));
    if (i > begin && bytes + size > max_shard_bytes) {
      shards.push_back(items.subspan(begin, i - begin));
      begin = i;
      bytes = 0;
    }
    bytes += size;
  }
  shards.push_back(items.subspan(begin));
  return shards;
}

void WriteShard(const fs::path& path, std::span<const Item> items, DType dtype,
                RecentTensors& tensors) {
  std::vector<io::SafetensorsWriter::Spec> specs;
  for (const Item& item : items) specs.push_back({item.part.name, dtype, item.part.shape});
  io::SafetensorsWriter writer(path, specs, kMetadata);
  for (const Item& item : items) {
    const Tensor& source = tensors.Get(item.source);
    const DType stored = source.dtype();
    const Tensor view =
        Tensor::Borrow(static_cast<std::byte*>(source.raw()) +
                           item.part.begin * static_cast<std::int64_t>(SizeOf(stored)),
                       item.part.shape, stored);
    writer.Append(stored == dtype ? view : ConvertTo(view, dtype));
  }
  writer.Finish();
}

void WriteWeights(const fs::path& directory, std::span<const Item> items, const TensorSource& read,
                  const ExportOptions& options) {
  RecentTensors tensors(read);
  const auto shards = CutShards(items, options.dtype, options.max_shard_bytes);
  if (shards.size() == 1) {
    WriteShard(directory / "model.safetensors", items, options.dtype, tensors);
    return;
  }
  io::SafetensorsIndex index;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    WriteShard(directory / name, shards[i], options.dtype, tensors);
    for (const Item& item : shards[i]) {
      index.weight_map[item.part.name] = name;
      total += static_cast<std::uint64_t>(item.part.shape.numel()) * SizeOf(options.dtype);
    }
  }
  index.total_size = total;
  io::WriteNewFile(directory / "model.safetensors.index.json", io::ToJson(index));
}

void CopyTokenizerAndGeneration(const fs::path& from, const fs::path& to) {
  constexpr const char* kFiles[] = {
      "tokenizer.json",    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
      "added_tokens.json", "chat_template.jinja",   "vocab.json",      "merges.txt"};
  bool any = false;
  for (const char* name : kFiles) {
    if (!fs::is_regular_file(from / name)) continue;
    io::WriteNewFile(to / name, io::ReadFile(from / name));
    any = true;
  }
  // Settings of sampling are its maker's, too.
  if (fs::is_regular_file(from / kGenerationConfig)) {
    io::WriteNewFile(to / kGenerationConfig, io::ReadFile(from / kGenerationConfig));
  }
  if (!any) LogWarning("{}: has no tokenizer files to copy", from.string());
}

void CheckIsMixtral(const fs::path& directory, const MixtralConfig& config) {
  Validate(config);
  if (const auto lacking = OptionsThatMixtralLacks(config); !lacking.empty()) {
    CISTRON_THROW(kUnsupported,
                  "{}: this model cannot be a Hugging Face Mixtral, which has no {}; its "
                  "checkpoint is the model",
                  directory.string(), fmt::join(lacking, ", no "));
  }
}

}  // namespace

void SaveHuggingFace(const fs::path& directory, const MixtralConfig& config,
                     std::span<const io::NamedTensor> tensors, const ExportOptions& options) {
  CheckIsMixtral(directory, config);
  std::map<std::string, const Tensor*> given;
  for (const io::NamedTensor& t : tensors) {
    CISTRON_CHECK(given.emplace(t.name, &t.tensor).second,
                  "SaveHuggingFace: tensor {} is given twice", t.name);
  }
  auto unknown = given;
  for (const ParameterInfo& parameter : MixtralParameters(config)) {
    CISTRON_CHECK(unknown.erase(parameter.name) == 1, "SaveHuggingFace: tensor {} is missing",
                  parameter.name);
  }
  CISTRON_CHECK(unknown.empty(), "SaveHuggingFace: tensor {} is not one of this model's",
                unknown.begin()->first);
  SaveHuggingFaceFrom([&](const std::string& name) { return *given.at(name); }, directory, config,
                      options);
}

void SaveHuggingFaceFrom(const TensorSource& read, const fs::path& directory,
                         const MixtralConfig& config, const ExportOptions& options) {
  CheckIsMixtral(directory, config);
  const std::string dtype(TorchName(options.dtype));
  CISTRON_CHECK(options.max_shard_bytes > 0, "SaveHuggingFace: max_shard_bytes is {}",
                options.max_shard_bytes);
  const std::vector<Item> items = CollectItems(config, options.layout);
  if (!options.overwrite && fs::exists(directory) && !fs::is_empty(directory)) {
    CISTRON_THROW(kAlreadyExists, "{}: exists already; remove it or choose another name",
                  directory.string());
  }
  io::AtomicDirectory out(directory);
  io::WriteNewFile(out.path() / "config.json", ToJson(config, dtype));
  io::WriteNewFile(out.path() / kGenerationConfig, GenerationConfigJson(config));
  WriteWeights(out.path(), items, read, options);
  if (!options.tokenizer_from.empty()) {
    CopyTokenizerAndGeneration(options.tokenizer_from, out.path());
  } else if (options.write_tokenizer) {
    if (config.vocab_size >= kSmallestVocabulary && config.vocab_size <= kLargestVocabulary) {
      WriteTokenizerFiles(out.path(), config);
    } else {
      LogWarning(
          "{}: no tokenizer files, since a vocabulary of {} is not that of the byte tokenizer",
          directory.string(), config.vocab_size);
    }
  }
  out.Commit(options.overwrite);
}

}  // namespace cistron::model
