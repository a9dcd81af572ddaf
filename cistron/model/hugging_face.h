// Mixtral models in Hugging Face's format: in and out.
//
// Reads config.json and model.safetensors, or the shards that model.safetensors.index.json names;
// experts as published (block_sparse_moe.experts.N.w1/w2/w3, block_sparse_moe.gate) or stacked
// (mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate). Every tensor is accounted for: a
// missing, an unexpected or a misshapen one is an error that names it, as is one that is not f32,
// bf16 or f16. Writes what save_pretrained writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cistron/io/safetensors.h"
#include "cistron/model/mixtral_config.h"
#include "cistron/tensor/tensor.h"

namespace cistron::model {

// Names and global shapes of all parameters, in canonical order: those of transformers 5 in memory,
// e.g. "model.layers.0.mlp.experts.gate_up_proj" [E, 2F, H], gate rows first. A tied head has none
// of its own. A shared expert is stacked too: "mlp.shared_experts.gate_up_proj" [1, 2F, H] and
// "mlp.shared_experts.down_proj" [1, H, F], F its own width.
struct ParameterInfo {
  std::string name;
  Shape shape;
};
std::vector<ParameterInfo> MixtralParameters(const MixtralConfig& config);
// State that is not trained, f32: the bias of each layer's router, where there is one.
std::vector<ParameterInfo> MixtralBuffers(const MixtralConfig& config);

struct HuggingFaceModel {
  MixtralConfig config;
  std::string dtype;                     // as in config.json
  std::vector<io::NamedTensor> tensors;  // canonical names and order, as stored (dtype of the file)
};
// A config.json with options that Mixtral lacks is refused: no published model has them under this
// model type. Throws kNotFound, kBadInput or kUnsupported, naming the file, the tensor and what to
// change.
HuggingFaceModel LoadHuggingFace(const std::filesystem::path& directory);

enum class ExpertLayout { kPublished, kStacked };
struct ExportOptions {
  ExpertLayout layout = ExpertLayout::kPublished;
  DType dtype = DType::kF32;  // f32, bf16 or f16
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  // The byte tokenizer's files (tokenizer_files.h); left out, with a warning, where the size of the
  // vocabulary says that another tokenizer made it.
  bool write_tokenizer = true;
  // When not empty: a model directory whose own tokenizer files and generation_config.json are
  // copied.
  std::filesystem::path tokenizer_from = {};
  bool overwrite =
      false;  // replace a directory that is there, in one step; otherwise kAlreadyExists
};
// kUnsupported, naming them, when the model uses options that Mixtral lacks. Writes config.json,
// generation_config.json, the weights (sharded with an index above
// max_shard_bytes) and tokenizer files, into a new directory that appears atomically. `tensors` are
// canonical and complete.
void SaveHuggingFace(const std::filesystem::path& directory, const MixtralConfig& config,
                     std::span<const io::NamedTensor> tensors, const ExportOptions& options);
// The same with tensors that are read when they are written, a few at a time: for models that no
// memory holds whole. `read` gives each by its canonical name, and may be asked twice.
using TensorSource = std::function<Tensor(const std::string& name)>;
void SaveHuggingFaceFrom(const TensorSource& read, const std::filesystem::path& directory,
                         const MixtralConfig& config, const ExportOptions& options);

}  // namespace cistron::model
