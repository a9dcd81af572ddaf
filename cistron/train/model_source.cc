#include "cistron/train/model_source.h"

#include <map>
#include <set>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/file.h"
#include "cistron/train/run_directory.h"
#include "cistron/train/training_state.h"

namespace cistron::train {
namespace {

namespace fs = std::filesystem;

model::HuggingFaceModel ReadCheckpoint(const fs::path& path) {
  const io::CheckpointReader reader(path);
  model::HuggingFaceModel m;
  m.config = CheckpointModelConfig(reader, path, &m.dtype);
  // Every tensor is accounted for: weights and masters are read, moments are the optimiser's, and
  // states of delayed scaling the recipe's, which belongs to a run and not to its model.
  std::set<std::string> unread;
  for (const std::string& name : reader.names()) {
    if (!name.starts_with(kScalingPrefix)) unread.insert(name);
  }
  const auto take = [&](const std::string& name, const std::string& stored, const Shape& shape) {
    const auto info = reader.Find(stored);
    if (!info) {
      CISTRON_THROW(kBadInput, "{}: the checkpoint lacks the tensor {}", path.string(), stored);
    }
    if (!(info->global_shape == shape)) {
      CISTRON_THROW(kBadInput, "{}: {} has shape {}, but its model's has {}", path.string(), stored,
                    ToString(info->global_shape), ToString(shape));
    }
    m.tensors.push_back({name, reader.Read(stored)});
    unread.erase(stored);
  };
  for (const auto& [name, shape] : model::MixtralParameters(m.config)) {
    const std::string master = "master/" + name;
    take(name, reader.Find(master) ? master : "weight/" + name, shape);
    for (const char* role : {"weight/", "moment1/", "moment2/"}) unread.erase(role + name);
  }
  for (const auto& [name, shape] : model::MixtralBuffers(m.config)) {
    take(name, BufferKey(name), shape);
  }
  if (!unread.empty()) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint holds {}, which its model does not have",
                  path.string(), *unread.begin());
  }
  return m;
}

}  // namespace

ModelSource FindModel(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    CISTRON_THROW(kNotFound,
                  "{}: there is no such directory; give a Hugging Face directory, a "
                  "checkpoint or a run directory",
                  path.string());
  }
  if (fs::exists(path / "manifest.json")) return {ModelKind::kCheckpoint, path};
  if (fs::exists(path / "config.json")) return {ModelKind::kHuggingFace, path};
  const RunPaths run{path};
  if (fs::exists(run.final_model() / "config.json")) {
    return {ModelKind::kHuggingFace, run.final_model()};
  }
  for (const fs::path& root : {run.checkpoints(), path}) {
    if (!fs::exists(root)) continue;
    if (const auto newest = io::NewestGoodCheckpoint(root))
      return {ModelKind::kCheckpoint, *newest};
  }
  CISTRON_THROW(kBadInput,
                "{}: there is neither config.json (a Hugging Face directory), nor "
                "manifest.json (a checkpoint), nor a finished checkpoint of a run",
                path.string());
}

model::MixtralConfig ReadModelConfig(const ModelSource& source, std::string* dtype) {
  if (source.kind == ModelKind::kCheckpoint) {
    return CheckpointModelConfig(io::CheckpointReader(source.path), source.path, dtype);
  }
  const fs::path file = source.path / "config.json";
  return model::ParseMixtralConfig(io::ReadFile(file), file.string(), dtype);
}

model::HuggingFaceModel ReadModel(const ModelSource& source) {
  return source.kind == ModelKind::kCheckpoint ? ReadCheckpoint(source.path)
                                               : model::LoadHuggingFace(source.path);
}

void LoadWeights(const ModelSource& source, nn::LocalParameterStore& store) {
  const model::HuggingFaceModel m = ReadModel(source);
  std::set<std::string> assigned;
  for (const io::NamedTensor& t : m.tensors) {
    const auto* parameter = store.Find(t.name);
    const auto* buffer = store.FindBuffer(t.name);
    if (parameter == nullptr && buffer == nullptr) {
      CISTRON_THROW(kBadInput, "{}: the tensor {} is not in this model", source.path.string(),
                    t.name);
    }
    const Shape& shape = parameter != nullptr ? parameter->spec.shape : buffer->value.shape();
    if (!(shape == t.tensor.shape())) {
      CISTRON_THROW(kBadInput, "{}: {} has shape {}, but this model's has {}", source.path.string(),
                    t.name, ToString(t.tensor.shape()), ToString(shape));
    }
    store.Assign(t.name, t.tensor);
    assigned.insert(t.name);
  }
  std::vector<std::string> needed;
  for (const auto& parameter : store.parameters()) needed.push_back(parameter.spec.name);
  for (const auto& buffer : store.buffers()) needed.push_back(buffer.name);
  for (const std::string& name : needed) {
    if (!assigned.contains(name)) {
      CISTRON_THROW(kBadInput, "{}: the tensor {} is missing", source.path.string(), name);
    }
  }
}

std::unique_ptr<model::LocalMixtral> LoadModel(const ops::Context& ctx, const fs::path& path,
                                               DType dtype) {
  const ModelSource source = FindModel(path);
  auto m = std::make_unique<model::LocalMixtral>(ctx, ReadModelConfig(source), dtype);
  LoadWeights(source, m->store);
  return m;
}

void ExportCheckpoint(const fs::path& checkpoint, const fs::path& directory,
                      const model::ExportOptions& options) {
  const io::CheckpointReader reader(checkpoint);
  const auto read = [&](const std::string& name) {
    const std::string master = "master/" + name;
    return reader.Read(reader.Find(master) ? master : "weight/" + name);
  };
  model::SaveHuggingFaceFrom(read, directory, CheckpointModelConfig(reader, checkpoint), options);
}

std::vector<io::NamedTensor> ExportWeights(const nn::LocalParameterStore& store) {
  std::vector<io::NamedTensor> tensors;
  for (const auto& parameter : store.parameters()) {
    tensors.push_back({parameter.spec.name, parameter.master.ToHost()});
  }
  return tensors;
}

}  // namespace cistron::train
