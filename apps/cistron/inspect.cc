// cistron inspect: what is in a checkpoint, a model directory or a safetensors file.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "apps/cistron/commands.h"
#include "cistron/base/error.h"
#include "cistron/io/checkpoint.h"
#include "cistron/io/manifest.h"
#include "cistron/io/safetensors.h"
#include "cistron/train/model_source.h"

namespace cistron::app {
namespace {

namespace fs = std::filesystem;

void Line(const std::string& name, DType dtype, const Shape& shape, const void* data,
          std::size_t bytes) {
  fmt::print("{:<62} {:<5} {:<20} {:016x}\n", name, Name(dtype), ToString(shape),
             io::Checksum(data, bytes));
}

void InspectFile(const fs::path& path) {
  const io::SafetensorsFile file(path);
  fmt::print("{}\n", path.string());
  for (const auto& [key, value] : file.metadata()) fmt::print("metadata {}: {}\n", key, value);
  std::int64_t elements = 0;
  for (const io::TensorEntry& entry : file.entries()) {
    const auto bytes = file.Bytes(entry);
    Line(entry.name, entry.dtype, entry.shape, bytes.data(), bytes.size());
    elements += entry.shape.numel();
  }
  fmt::print("{} tensors, {} elements\n", file.entries().size(), elements);
}

void InspectModel(const model::MixtralConfig& config, const std::string& dtype) {
  fmt::print(
      "Mixtral, {}: {} layers, hidden {}, ffn {}, {} heads of {} ({} for keys and values), {} "
      "experts, top-{}, vocabulary {}\n{} parameters, {} used by a token\n",
      dtype, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
      config.num_attention_heads, config.HeadDim(), config.num_key_value_heads,
      config.num_local_experts, config.num_experts_per_tok, config.vocab_size,
      model::ParameterCount(config), model::ActiveParameterCount(config));
}

void InspectCheckpoint(const fs::path& path) {
  const io::CheckpointReader reader(path);
  fmt::print("{}: checkpoint of step {}\n", path.string(), reader.step());
  for (const std::string& name : reader.names()) {
    const auto info = reader.Find(name);
    const Tensor tensor = reader.Read(name);  // verifies the stored checksums
    Line(name, info->dtype, info->global_shape, tensor.raw(),
         static_cast<std::size_t>(tensor.bytes()));
  }
  fmt::print("{} tensors; all stored checksums hold\n", reader.names().size());
}

class InspectCommand final : public Command {
 public:
  std::string name() const override { return "inspect"; }
  std::string summary() const override {
    return "shapes, dtypes and checksums of a checkpoint, model or safetensors file";
  }
  std::string footer() const override {
    return "Examples:\n"
           "  cistron inspect runs/L0_sanity/final\n"
           "  cistron inspect runs/L0_sanity/checkpoints/step-00001200\n"
           "  cistron inspect model.safetensors";
  }
  void Declare(Options& options) override {
    options.Positional("PATH", path_, "checkpoint, Hugging Face or run directory, or file");
  }

  int Run() override {
    if (fs::is_regular_file(path_)) {
      InspectFile(path_);
      return kOk;
    }
    const train::ModelSource source = train::FindModel(path_);
    std::string dtype;
    const model::MixtralConfig config = train::ReadModelConfig(source, &dtype);
    InspectModel(config, dtype);
    if (source.kind == train::ModelKind::kCheckpoint) {
      InspectCheckpoint(source.path);
      return kOk;
    }
    // Every file, in order; what the index and the model say is checked by reading them.
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(source.path)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    for (const fs::path& file : files) InspectFile(file);
    train::ReadModel(source);
    fmt::print("every tensor of the model is there, with its shape\n");
    return kOk;
  }

 private:
  std::string path_;
};

}  // namespace

std::unique_ptr<Command> MakeInspectCommand() {
  return std::make_unique<InspectCommand>();
}

}  // namespace cistron::app
