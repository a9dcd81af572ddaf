#include "cistron/model/hugging_face.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "cistron/base/error.h"
#include "cistron/base/log.h"
#include "cistron/io/file.h"
#include "cistron/io/json.h"
#include "cistron/model/published_layout.h"

namespace cistron::model {
namespace {

namespace fs = std::filesystem;

// Where a tensor lies.
struct Place {
  const io::SafetensorsFile* file;
  const io::TensorEntry* entry;
};

// The safetensors files of a model directory, and the tensors in them.
class Weights {
 public:
  explicit Weights(const fs::path& directory) {
    const fs::path single = directory / "model.safetensors";
    const fs::path index = directory / "model.safetensors.index.json";
    if (fs::exists(single)) {
      origin_ = single.string();
      Open(single);
    } else if (fs::exists(index)) {
      origin_ = index.string();
      OpenShards(directory, index);
    } else {
      const bool pickled = fs::exists(directory / "pytorch_model.bin") ||
                           fs::exists(directory / "pytorch_model.bin.index.json");
      CISTRON_THROW(kNotFound,
                    "{}: has neither model.safetensors nor model.safetensors.index.json{}",
                    directory.string(),
                    pickled ? "; its pytorch_model.bin is not read, save it again with "
                              "save_pretrained(…, safe_serialization=True)"
                            : "");
    }
  }

  const std::string& origin() const { return origin_; }
  const std::map<std::string, Place>& places() const { return places_; }
  const Place* Find(const std::string& name) const {
    const auto it = places_.find(name);
    return it == places_.end() ? nullptr : &it->second;
  }

 private:
  const io::SafetensorsFile& Open(const fs::path& path) {
    files_.push_back(std::make_unique<io::SafetensorsFile>(path));
    const io::SafetensorsFile& file = *files_.back();
    for (const io::TensorEntry& entry : file.entries()) {
      const auto [it, inserted] = places_.emplace(entry.name, Place{&file, &entry});
      if (!inserted) {
        CISTRON_THROW(kBadInput,
                      "{}: tensor {} is also in {}; one of the files does not belong to "
                      "this model",
                      path.string(), io::Quoted(entry.name), it->second.file->path().string());
      }
    }
    return file;
  }

  void OpenShards(const fs::path& directory, const fs::path& index_path) {
    const io::SafetensorsIndex index =
        io::ParseSafetensorsIndex(io::ReadFile(index_path), index_path.string());
    std::map<std::string, const io::SafetensorsFile*> shards;
    for (const auto& [tensor, name] : index.weight_map) {
      if (shards.contains(name)) continue;
      if (!fs::exists(directory / name)) {
        CISTRON_THROW(kNotFound,
                      "{}: names the file {} (for tensor {}), which is not there; copy or "
                      "download it into {}",
                      index_path.string(), io::Quoted(name), io::Quoted(tensor),
                      directory.string());
      }
      shards[name] = &Open(directory / name);
    }
    std::uint64_t total = 0;
    for (const auto& [tensor, place] : places_) {
      total += place.entry->end - place.entry->begin;
      const auto it = index.weight_map.find(tensor);
      if (it == index.weight_map.end()) {
        CISTRON_THROW(kBadInput, "{}: holds tensor {}, which the index {} does not name",
                      place.file->path().string(), io::Quoted(tensor), index_path.string());
      }
    }
    for (const auto& [tensor, name] : index.weight_map) {
      if (shards[name]->Find(tensor) == nullptr) {
        CISTRON_THROW(kBadInput,
                      "{}: says that tensor {} is in {}, but it is not there; the index and "
                      "the files are not of one model",
                      index_path.string(), io::Quoted(tensor), io::Quoted(name));
      }
    }
    // Published indices disagree with their files here (tied weights counted twice), so it is no
    // error.
    if (index.total_size && *index.total_size != total) {
      LogWarning("{}: total_size is {}, but the tensors have {} bytes", index_path.string(),
                 *index.total_size, total);
    }
  }

  std::string origin_;
  std::vector<std::unique_ptr<io::SafetensorsFile>> files_;
  std::map<std::string, Place> places_;
};

// Copies tensors into canonical ones and accounts for each name it has taken.
class Assembler {
 public:
  explicit Assembler(const Weights& weights) : weights_(weights) {}

  Tensor Assemble(const ParameterInfo& parameter) {
    const bool stacked = weights_.Find(parameter.name) != nullptr;
    const std::vector<FilePart> parts =
        FileParts(parameter, stacked ? ExpertLayout::kStacked : ExpertLayout::kPublished);
    Tensor out;
    for (const FilePart& part : parts) {
      const Place& place = Take(part, parameter);
      const io::TensorEntry& entry = *place.entry;
      if (!out) {
        out = Tensor::Empty(parameter.shape, entry.dtype);
      } else if (entry.dtype != out.dtype()) {
        CISTRON_THROW(kUnsupported,
                      "{}: tensor {} is {} but others of {} are {}; save the model in one "
                      "dtype",
                      place.file->path().string(), io::Quoted(part.name), Name(entry.dtype),
                      parameter.name, Name(out.dtype()));
      }
      const std::span<const std::byte> bytes = place.file->Bytes(entry);
      std::memcpy(static_cast<std::byte*>(out.raw()) +
                      part.begin * static_cast<std::int64_t>(SizeOf(entry.dtype)),
                  bytes.data(), bytes.size());
    }
    return out;
  }

  // A tied model may store its head all the same, if it is the embedding.
  void AcceptTiedHead(const Tensor& embedding) {
    const Place* head = weights_.Find("lm_head.weight");
    if (head == nullptr) return;
    const std::span<const std::byte> bytes = head->file->Bytes(*head->entry);
    if (head->entry->dtype != embedding.dtype() || head->entry->shape != embedding.shape() ||
        std::memcmp(bytes.data(), embedding.raw(), bytes.size()) != 0) {
      CISTRON_THROW(
          kBadInput,
          "{}: holds an lm_head.weight that differs from "
          "model.embed_tokens.weight, but config.json says tie_word_embeddings; set it to "
          "false or remove the tensor",
          head->file->path().string());
    }
    taken_.insert("lm_head.weight");
  }

  void CheckAllTaken() const {
    std::string names;
    std::size_t left = 0;
    for (const auto& [name, place] : weights_.places()) {
      if (taken_.contains(name)) continue;
      if (++left <= 3) names += (names.empty() ? "" : ", ") + io::Quoted(name);
    }
    if (left > 0) {
      CISTRON_THROW(kBadInput,
                    "{}: {} tensor{} that a Mixtral of this config.json does not have: {}{}; "
                    "check that config.json and the weights are of one model",
                    weights_.origin(), left, left == 1 ? "" : "s", names, left > 3 ? ", …" : "");
    }
  }

 private:
  const Place& Take(const FilePart& part, const ParameterInfo& parameter) {
    const Place* place = weights_.Find(part.name);
    if (place == nullptr) {
      CISTRON_THROW(
          kBadInput,
          "{}: tensor {} is missing{}; check that config.json and the weights are of "
          "one model",
          weights_.origin(), io::Quoted(part.name),
          part.name == parameter.name ? "" : fmt::format(" (and so is {})", parameter.name));
    }
    const io::TensorEntry& entry = *place->entry;
    if (entry.shape != part.shape) {
      const bool transposed = part.shape.rank() == 2 && entry.shape.rank() == 2 &&
                              entry.shape[0] == part.shape[1] && entry.shape[1] == part.shape[0];
      CISTRON_THROW(kBadInput, "{}: tensor {} has shape {}, expected {} by config.json{}",
                    place->file->path().string(), io::Quoted(part.name), ToString(entry.shape),
                    ToString(part.shape),
                    transposed ? "; it is stored transposed, weights are [out, in]" : "");
    }
    if (entry.dtype != DType::kF32 && entry.dtype != DType::kBF16 && entry.dtype != DType::kF16) {
      CISTRON_THROW(kUnsupported,
                    "{}: tensor {} is {}; weights must be f32, bf16 or f16; store them as such",
                    place->file->path().string(), io::Quoted(part.name), Name(entry.dtype));
    }
    taken_.insert(part.name);
    return *place;
  }

  const Weights& weights_;
  std::set<std::string> taken_;
};

}  // namespace

HuggingFaceModel LoadHuggingFace(const fs::path& directory) {
  if (!fs::is_directory(directory)) {
    CISTRON_THROW(kNotFound, "{}: no such directory", directory.string());
  }
  const fs::path config_path = directory / "config.json";
  HuggingFaceModel model;
  model.config = ParseMixtralConfig(io::ReadFile(config_path), config_path.string(), &model.dtype);
  if (const auto lacking = OptionsThatMixtralLacks(model.config); !lacking.empty()) {
    CISTRON_THROW(kUnsupported, "{}: has {}, which no Mixtral of Hugging Face has",
                  config_path.string(), fmt::join(lacking, ", "));
  }
  const Weights weights(directory);
  Assembler assembler(weights);
  for (const ParameterInfo& parameter : MixtralParameters(model.config)) {
    model.tensors.push_back({parameter.name, assembler.Assemble(parameter)});
  }
  if (model.config.tie_word_embeddings) assembler.AcceptTiedHead(model.tensors.front().tensor);
  assembler.CheckAllTaken();
  return model;
}

}  // namespace cistron::model
