#include "cistron/train/run_description.h"

#include <fmt/format.h>

#include <utility>

#include "cistron/base/threads.h"
#include "cistron/tensor/cuda_backend.h"
#include "cistron/train/memory_plan.h"
#include "cistron/train/progress.h"

namespace cistron::train {
namespace {

std::string PrecisionText(const RunConfig& c) {
  if (c.precision == Precision::kFp32) return "fp32";
  std::string text = c.HasMasters() ? "bf16 with fp32 masters"
                                    : "bf16 weights and optimiser states, no fp32 masters";
  const quant::Recipe recipe = MakeRecipe(c.precision, c.recipe);
  if (quant::Quantizes(recipe)) text += fmt::format(", products in {}", quant::Name(recipe));
  const std::string gradients = GradientText(c.GradientDType(), c.OneMicroBatch());
  if (!gradients.empty()) text += ", " + gradients;
  return text;
}

std::string DeviceText(const parallel::Mesh& mesh, Device device,
                       const parallel::ExpertParallelDispatcher* experts) {
  const std::string ranks =
      mesh.size() == 1 ? ""
                       : fmt::format("{} ranks ({}, parallel.dp={} parallel.ep={}) of ",
                                     mesh.size(), mesh.world().transport(), mesh.dp(), mesh.ep());
  if (device.type == DeviceType::kCpu) {
    return fmt::format("{}{} thread{}", ranks, NumThreads(), NumThreads() == 1 ? "" : "s");
  }
  std::string rows;
  if (experts != nullptr) {
    const std::string& why = experts->why_by_host();
    rows = why.empty() ? fmt::format(
                             ", whose rows of experts go into each other's memory, with room for "
                             "{:.3g} times an even share (parallel.ep_buffer_factor)",
                             experts->buffer_factor())
                       : fmt::format(
                             ", whose rows of experts go through NCCL, counted by the "
                             "hosts: {}",
                             why);
  }
  return ranks + cuda::Devices().at(static_cast<std::size_t>(device.index)).name + rows;
}

}  // namespace

std::vector<std::string> DescribeRun(const RunConfig& config, const data::Corpus& corpus,
                                     const parallel::Mesh& mesh, Device device,
                                     const parallel::ExpertParallelDispatcher* experts) {
  std::vector<std::string> lines;
  const model::MixtralConfig& m = config.model;
  lines.push_back(fmt::format("model: {} parameters, {} a token; {} layers, {} experts, top-{}; {}",
                              FormatCount(static_cast<double>(model::ParameterCount(m))),
                              FormatCount(static_cast<double>(model::ActiveParameterCount(m))),
                              m.num_hidden_layers, m.num_local_experts, m.num_experts_per_tok,
                              PrecisionText(config)));
  const auto heldout = static_cast<double>(corpus.heldout_bases());
  lines.push_back(fmt::format(
      "data: {} {}s train, {} held out; {} tokens a step, {} steps; {}",
      FormatCount(static_cast<double>(corpus.train_bases())), data::UnitName(config.data.alphabet),
      config.data.split.kind == data::SplitRule::Kind::kNone ? "none" : FormatCount(heldout),
      config.batch.global_tokens, config.train.steps, DeviceText(mesh, device, experts)));
  const double all_layers = m.output_router_logits ? m.router_aux_loss_coef : 0;
  bool none = true;
  for (const auto& [name, coefficient] :
       {std::pair{"load-balancing loss of all layers together", all_layers},
        {"load-balancing loss of each layer", m.moe_aux_loss_coeff},
        {"router z-loss of each layer", m.moe_z_loss_coeff}}) {
    if (coefficient == 0) continue;
    lines.push_back(
        fmt::format("auxiliary loss: {} times the {} is part of the training loss; metrics "
                    "show it apart",
                    coefficient, name));
    none = false;
  }
  if (none) {
    lines.push_back(
        "auxiliary loss: not part of the training loss (model.moe_aux_loss_coeff, or "
        "model.output_router_logits with model.router_aux_loss_coef, would balance the experts)");
  }
  const bool strands = data::ByteTable::Of(config.data.alphabet).HasComplement();
  // The default was not asked for.
  const double reversed = config.data.reverse_complement;
  if (!strands && reversed > 0 && reversed != data::DataConfig().reverse_complement) {
    lines.push_back(fmt::format("data.reverse_complement={} has no effect: {} has no other strand",
                                reversed, data::AlphabetName(config.data.alphabet)));
  }
  return lines;
}

}  // namespace cistron::train
