// Models on disk: Hugging Face directories and checkpoints, read the same way.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cistron/model/hugging_face.h"
#include "cistron/train/training_step.h"

namespace cistron::train {

enum class ModelKind { kHuggingFace, kCheckpoint };

struct ModelSource {
  ModelKind kind;
  std::filesystem::path path;
};

// What lies at `path`: a Hugging Face directory, a checkpoint, or a run directory, which stands for
// its final model or else its newest good checkpoint. Throws kNotFound or kBadInput saying what is
// missing.
ModelSource FindModel(const std::filesystem::path& path);

// The configuration alone, without the weights. `dtype`, optional: "float32" or "bfloat16".
model::MixtralConfig ReadModelConfig(const ModelSource& source, std::string* dtype = nullptr);

// Weights and then buffers by canonical name, in canonical order; a checkpoint's masters where it
// has any.
model::HuggingFaceModel ReadModel(const ModelSource& source);

// Sets every parameter and buffer of the store from the source; masters receive the exact values.
// Throws kBadInput naming the first missing, unexpected or misshapen tensor.
void LoadWeights(const ModelSource& source, nn::LocalParameterStore& store);

// A model ready to evaluate.
std::unique_ptr<model::LocalMixtral> LoadModel(const ops::Context& ctx,
                                               const std::filesystem::path& path, DType dtype);

// A checkpoint's model as a Hugging Face directory, read a few tensors at a time.
void ExportCheckpoint(const std::filesystem::path& checkpoint,
                      const std::filesystem::path& directory, const model::ExportOptions& options);

// The store's weights (masters) as canonical tensors; they share memory with the store.
std::vector<io::NamedTensor> ExportWeights(const nn::LocalParameterStore& store);

}  // namespace cistron::train
