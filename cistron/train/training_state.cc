#include "cistron/train/training_state.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"
#include "cistron/io/manifest.h"
#include "cistron/parallel/agreement.h"

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

// What a rank has of a state of delayed scaling, whose last dimension counts the groups of a
// tensor: the columns of its experts, or all.
struct Part {
  std::int64_t index = 0, of = 1;
  bool counted = true;  // false: another rank saves them
};

// Of a state "PARAMETER/ROLE/…".
Part PartOf(const nn::LocalParameterStore& store, const std::string& state) {
  const nn::ParameterPartition& partition = store.partition();
  const std::size_t role = state.rfind('/', state.rfind('/') - 1);
  const auto* parameter = store.Find(state.substr(0, role));
  if (parameter == nullptr || !parameter->spec.is_expert) {
    return {.counted = partition.counts_dense};
  }
  return {partition.expert_rank, partition.expert_ranks, partition.counts_experts};
}

void RestoreScaling(const io::CheckpointReader& reader, const std::string& key,
                    const nn::LocalParameterStore& store, quant::ScalingStates& scaling) {
  const std::string name = key.substr(kScalingPrefix.size());
  const Part part = PartOf(store, name);
  Shape size = reader.Find(key)->global_shape, start = size;
  for (int i = 0; i < start.rank(); ++i) start[i] = 0;
  const int groups = size.rank() - 1;
  size[groups] /= part.of;
  start[groups] = size[groups] * part.index;
  scaling.Restore(name, reader.Read(key, start, size));
}

}  // namespace

TrainingSnapshot TrainingSnapshot::Copy() const {
  TrainingSnapshot copy = *this;
  for (io::CheckpointBox& box : copy.boxes) {
    const Tensor host = Tensor::Empty(box.tensor.shape(), box.tensor.dtype());
    CopyTo(box.tensor, host);
    box.tensor = host;
  }
  return copy;
}

fs::path WriteSnapshot(const fs::path& root, const TrainingSnapshot& s, comm::Communicator& ranks) {
  if (ranks.size() == 1) return io::SaveCheckpoint(root, s.step, s.boxes, s.state_json);
  // The checkpoint appears when every rank has written, or nowhere.
  std::optional<io::CheckpointWriter> writer;  // of the first rank
  const fs::path directory =
      parallel::FromFirst(ranks, [&] { return writer.emplace(root, s.step).directory().string(); });
  const std::vector<std::string> parts = parallel::FromAll(
      ranks, [&] { return io::WriteCheckpointPart(directory, ranks.rank(), s.boxes); });
  return parallel::FromFirst(ranks, [&] { return writer->Commit(parts, s.state_json).string(); });
}

std::uint64_t WeightsChecksum(const optim::AdamWOptimizer& optimizer, comm::Communicator& ranks) {
  // Boxes are added up, so that their order among ranks means nothing; a box is told by its place.
  std::uint64_t sum = 0;
  for (const auto& s : optimizer.State()) {
    if (!s.counted || s.tensor.numel() == 0 || !s.name.starts_with("weight/")) continue;
    const Tensor host = s.tensor.ToHost();
    std::uint64_t hash =
        Mix64(HashName(s.name) ^ io::Checksum(host.raw(), static_cast<std::size_t>(host.bytes())));
    for (int i = 0; i < s.start.rank(); ++i) {
      hash = Mix64(hash ^ static_cast<std::uint64_t>(s.start[i]));
    }
    sum += hash;
  }
  const Tensor all = Tensor::Zeros({1}, DType::kI64);
  all.span<std::int64_t>()[0] = static_cast<std::int64_t>(sum);
  if (ranks.size() > 1) ranks.AllReduce(all);
  return static_cast<std::uint64_t>(all.span<std::int64_t>()[0]);
}

TrainingSnapshot TakeSnapshot(const model::LocalMixtral& m, const optim::AdamWOptimizer& optimizer,
                              const quant::ScalingStates& scaling, const DataPosition& data,
                              const RunConfig& config) {
  std::vector<io::CheckpointBox> boxes;
  for (const auto& s : optimizer.State()) {
    if (s.counted && s.tensor.numel() > 0)
      boxes.push_back({s.name, s.tensor, s.global_shape, s.start});
  }
  if (m.store.partition().counts_dense) {
    for (const auto& buffer : m.store.buffers()) {
      boxes.push_back(WholeTensor(BufferKey(buffer.name), buffer.value));
    }
  }
  for (const auto& [name, tensor] : scaling.Tensors()) {
    const Part part = PartOf(m.store, name);
    if (!part.counted) continue;
    io::CheckpointBox box = WholeTensor(std::string(kScalingPrefix) + name, tensor);
    const int groups = tensor.rank() - 1;  // its last dimension
    box.global_shape[groups] = tensor.dim(groups) * part.of;
    box.start[groups] = tensor.dim(groups) * part.index;
    boxes.push_back(std::move(box));
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
  if (m.expert_ranks != nullptr) {
    state["expert_buffer_factor"] = m.expert_ranks->buffer_factor();
  }
  return {optimizer.step(), std::move(boxes), state.dump()};
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
  std::vector<optim::AdamWOptimizer::StateTensor> wanted = optimizer.State();
  for (const auto& buffer : m.store.buffers()) {
    const io::CheckpointBox whole = WholeTensor(BufferKey(buffer.name), buffer.value);
    wanted.push_back({whole.name, whole.tensor, whole.global_shape, whole.start});
  }
  for (const auto& [name, tensor, global_shape, start, counted] : wanted) {
    const auto info = reader.Find(name);
    if (!info) {
      CISTRON_THROW(kBadInput, "{}: the checkpoint is of another model: it lacks {}", path.string(),
                    name);
    }
    if (!(info->global_shape == global_shape) || info->dtype != tensor.dtype()) {
      CISTRON_THROW(kBadInput,
                    "{}: the checkpoint is of another model: {} is {} {}, but this run's "
                    "is {} {}",
                    path.string(), name, Name(info->dtype), ToString(info->global_shape),
                    Name(tensor.dtype()), ToString(global_shape));
    }
    if (tensor.numel() > 0) CopyTo(reader.Read(name, start, tensor.shape()), tensor);
    unread.erase(name);
  }
  m.store.MarkChanged();
  for (auto it = unread.begin(); it != unread.end();) {
    if (it->starts_with(kScalingPrefix)) {
      RestoreScaling(reader, *it, m.store, scaling);
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
    // Rows that did not fit before the checkpoint fit at once, in products of the same tiles.
    if (m.expert_ranks != nullptr && state.contains("expert_buffer_factor")) {
      m.expert_ranks->RaiseBufferFactor(state.at("expert_buffer_factor").get<double>());
    }
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
