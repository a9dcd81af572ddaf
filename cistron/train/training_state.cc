#include "cistron/train/training_state.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kFormat = 1;

json ParseState(const io::CheckpointReader& reader, const fs::path& path) {
  try {
    json state = json::parse(reader.state_json());
    if (state.at("format").get<int>() != kFormat) {
      CISTRON_THROW(kBadInput, "{}: the checkpoint's state has format {}; this version reads {}",
                    path.string(), state.at("format").dump(), kFormat);
    }
    return state;
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint's state is damaged: {}", path.string(),
                  error.what());
  }
}

const char* HuggingFaceDType(DType dtype) {
  return dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF64 ? "float64" : "float32";
}

io::CheckpointBox WholeTensor(std::string name, const Tensor& tensor) {
  Shape start = tensor.shape();
  for (int i = 0; i < start.rank(); ++i) start[i] = 0;
  return {std::move(name), tensor, tensor.shape(), start};
}

}  // namespace

fs::path SaveTrainingState(const fs::path& root, const model::LocalMixtral& m,
                           const optim::AdamWOptimizer& optimizer,
                           const quant::ScalingStates& scaling, const DataPosition& data,
                           const RunConfig& config) {
  std::vector<io::CheckpointBox> boxes;
  for (const auto& [name, tensor] : optimizer.State()) boxes.push_back(WholeTensor(name, tensor));
  for (const auto& buffer : m.store.buffers()) {
    boxes.push_back(WholeTensor(BufferKey(buffer.name), buffer.value));
  }
  for (const auto& [name, tensor] : scaling.Tensors()) {
    boxes.push_back(WholeTensor(std::string(kScalingPrefix) + name, tensor));
  }
  const char* dtype = HuggingFaceDType(m.store.dtype());
  json state;
  state["format"] = kFormat;
  state["step"] = optimizer.step();
  state["stream"] = {{"step", data.stream.step},
                     {"epoch", data.stream.epoch},
                     {"window", data.stream.window},
                     {"offset", data.stream.offset}};
  state["data_fingerprint"] = data.fingerprint;
  state["dtype"] = dtype;
  state["model"] = json::parse(model::ToJson(m.model.config(), dtype));
  state["config"] = ToYaml(config);
  return io::SaveCheckpoint(root, optimizer.step(), boxes, state.dump());
}

DataPosition RestoreTrainingState(const fs::path& path, model::LocalMixtral& m,
                                  optim::AdamWOptimizer& optimizer, quant::ScalingStates& scaling) {
  const io::CheckpointReader reader(path);
  const json state = ParseState(reader, path);
  if (!state.contains("stream")) {
    CISTRON_THROW(kBadInput,
                  "{}: the checkpoint holds weights alone; start from it with "
                  "init.from={}",
                  path.string(), path.string());
  }
  std::set<std::string> unread;
  for (const std::string& name : reader.names()) unread.insert(name);
  std::vector<std::pair<std::string, Tensor>> wanted;
  for (const auto& [name, tensor] : optimizer.State()) wanted.emplace_back(name, tensor);
  for (const auto& buffer : m.store.buffers()) {
    wanted.emplace_back(BufferKey(buffer.name), buffer.value);
  }
  for (const auto& [name, tensor] : wanted) {
    const auto info = reader.Find(name);
    if (!info) {
      CISTRON_THROW(kBadInput, "{}: the checkpoint is of another model: it lacks {}", path.string(),
                    name);
    }
    if (!(info->global_shape == tensor.shape()) || info->dtype != tensor.dtype()) {
      CISTRON_THROW(kBadInput,
                    "{}: the checkpoint is of another model: {} is {} {}, but this run's "
                    "is {}",
                    path.string(), name, Name(info->dtype), ToString(info->global_shape),
                    Describe(tensor));
    }
    const Tensor stored = reader.Read(name);
    CopyTo(stored, tensor);
    unread.erase(name);
  }
  m.store.MarkChanged();
  for (auto it = unread.begin(); it != unread.end();) {
    if (it->starts_with(kScalingPrefix)) {
      scaling.Restore(it->substr(kScalingPrefix.size()), reader.Read(*it));
      it = unread.erase(it);
    } else {
      ++it;
    }
  }
  if (!unread.empty()) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint is of another model: it holds {}", path.string(),
                  *unread.begin());
  }
  try {
    optimizer.set_step(state.at("step").get<std::int64_t>());
    const json& stream = state.at("stream");
    return {{stream.at("step"), stream.at("epoch"), stream.at("window"), stream.at("offset")},
            state.at("data_fingerprint")};
  } catch (const json::exception& error) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint's state is damaged: {}", path.string(),
                  error.what());
  }
}

std::string BufferKey(const std::string& name) {
  return "buffer/" + name;
}

model::MixtralConfig CheckpointModelConfig(const io::CheckpointReader& reader, const fs::path& path,
                                           std::string* dtype) {
  const json state = ParseState(reader, path);
  if (!state.contains("model")) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint does not say which model it holds", path.string());
  }
  return model::ParseMixtralConfig(state["model"].dump(), path.string() + " (manifest.json)",
                                   dtype);
}

std::optional<RunConfig> CheckpointRunConfig(const io::CheckpointReader& reader,
                                             const fs::path& path) {
  const json state = ParseState(reader, path);
  if (!state.contains("config")) return std::nullopt;
  if (!state["config"].is_string()) {
    CISTRON_THROW(kBadInput, "{}: the checkpoint's state is damaged: config is no text",
                  path.string());
  }
  return ParseRunConfig(state["config"].get<std::string>(), path.string() + " (manifest.json)", {})
      .config;
}

fs::path SaveWeights(const fs::path& root, const model::HuggingFaceModel& m) {
  std::vector<io::CheckpointBox> boxes;
  std::set<std::string> buffers;
  for (const auto& [name, shape] : model::MixtralBuffers(m.config)) buffers.insert(name);
  for (const io::NamedTensor& t : m.tensors) {
    const bool buffer = buffers.contains(t.name);
    boxes.push_back(WholeTensor(buffer ? BufferKey(t.name) : "weight/" + t.name, t.tensor));
  }
  json state;
  state["format"] = kFormat;
  state["step"] = 0;
  state["dtype"] = m.dtype;
  state["model"] = json::parse(model::ToJson(m.config, m.dtype));
  return io::SaveCheckpoint(root, 0, boxes, state.dump());
}

}  // namespace cistron::train
