#include "cistron/train/golden_replay.h"

#include <nlohmann/json.hpp>

#include "cistron/io/file.h"
#include "cistron/ops/cross_entropy/cross_entropy.h"

namespace cistron::train {
namespace {

void ReadHyperparameters(const std::filesystem::path& path, GoldenFolder& folder) {
  const std::string text = io::ReadFile(path);
  try {
    const nlohmann::json about = nlohmann::json::parse(text);
    folder.lr = about.at("lr");
    optim::AdamWOptions& o = folder.optimizer;
    o.adamw.beta1 = about.at("betas").at(0);
    o.adamw.beta2 = about.at("betas").at(1);
    o.adamw.eps = about.at("eps");
    o.adamw.weight_decay = about.at("weight_decay");
    o.max_grad_norm = about.at("clip");
    o.decay_all = true;  // torch.optim.AdamW over one group of all parameters
  } catch (const nlohmann::json::exception& e) {
    CISTRON_THROW(kBadInput, "verify: '{}' is not a description of golden values: {}",
                  path.string(), e.what());
  }
}

}  // namespace

GoldenFolder::GoldenFolder(const std::filesystem::path& directory)
    : hf(model::LoadHuggingFace(directory)), tensors(directory / "golden.safetensors") {
  ReadHyperparameters(directory / "about.json", *this);
  input_ids = tensors.Read("input_ids");
  CISTRON_CHECK(input_ids.rank() == 3 && input_ids.dim(0) >= 1,
                "verify: input_ids is {}, expected [steps, batch, seq]", Describe(input_ids));
}

data::Batch GoldenFolder::MakeBatch(std::int64_t step) const {
  const std::int64_t batch = input_ids.dim(1);
  const std::int64_t length = input_ids.dim(2);
  data::Batch b;
  b.tokens = ConvertTo(input_ids.Select(step).Reshape({batch * length}), DType::kI64);
  b.labels = Tensor::Empty({batch * length}, DType::kI64);
  b.weights = Tensor::Empty({batch * length}, DType::kF32);
  b.sequences = ops::UniformSequences(batch, length);
  const auto tokens = b.tokens.span<std::int64_t>();
  const auto labels = b.labels.span<std::int64_t>();
  const auto weights = b.weights.span<float>();
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const bool last = (t + 1) % static_cast<std::size_t>(length) == 0;
    labels[t] = last ? ops::kIgnoreLabel : tokens[t + 1];
    weights[t] = last ? 0.0f : 1.0f;
  }
  return b;
}

GoldenReplay::GoldenReplay(const ops::Context& ctx, const GoldenFolder& folder,
                           const VerifyPrecision& precision)
    : ctx_(ctx),
      folder_(folder),
      recipe_(precision.recipe),
      local_(ctx, folder.hf.config, precision.dtype),
      optimizer_(ctx, local_.store, folder.optimizer) {
  for (const io::NamedTensor& t : folder.hf.tensors) local_.store.Assign(t.name, t.tensor);
}

model::Mixtral::Logits GoldenReplay::ComputeLogits(std::int64_t step) {
  const quant::Autocast autocast(recipe_, {.states = &scaling_, .record_amax = false});
  return local_.model.ComputeLogits(folder_.MakeBatch(step));
}

GoldenReplay::Loss GoldenReplay::ForwardBackward(std::int64_t step) {
  const data::Batch batch = folder_.MakeBatch(step);
  const model::MixtralConfig& config = folder_.hf.config;
  double weight_sum = 0;
  for (const float w : batch.weights.span<float>()) weight_sum += w;
  const model::LossScale scale{
      ctx_.Place(Tensor::Scalar(1 / weight_sum)),
      ctx_.Place(Tensor::Scalar(1 / static_cast<double>(batch.num_tokens())))};
  const quant::Autocast autocast(recipe_, {.states = &scaling_});
  model::LossSums sums = model::LossSums::Zeros(ctx_, config);
  local_.model.TrainMicroBatch(batch, scale, sums);
  const double aux = sums.aux_loss.item();
  const double coefficient = config.output_router_logits ? config.router_aux_loss_coef : 0;
  return {sums.weighted_nll.item() / weight_sum + coefficient * aux, aux};
}

}  // namespace cistron::train
