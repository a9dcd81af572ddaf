// A folder of golden values, and a model that makes its steps again. Internal to verify.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "cistron/data/batch.h"
#include "cistron/io/safetensors.h"
#include "cistron/model/hugging_face.h"
#include "cistron/model/local_mixtral.h"
#include "cistron/optim/adamw_optimizer.h"
#include "cistron/quant/autocast.h"
#include "cistron/train/verify.h"

namespace cistron::train {

// config.json, model.safetensors, golden.safetensors, about.json.
struct GoldenFolder {
  explicit GoldenFolder(const std::filesystem::path& directory);

  std::int64_t steps() const { return input_ids.dim(0); }
  // Batch of HF's causal language modelling: labels are the inputs, shifted by one.
  data::Batch MakeBatch(std::int64_t step) const;

  model::HuggingFaceModel hf;
  io::SafetensorsFile tensors;  // the golden values
  Tensor input_ids;             // [steps, batch, seq]
  double lr = 0;
  optim::AdamWOptions optimizer;
};

class GoldenReplay {
 public:
  // The folder must outlive the replay.
  GoldenReplay(const ops::Context& ctx, const GoldenFolder& folder,
               const VerifyPrecision& precision);

  // As in evaluation: delayed scaling leaves no amax of activations.
  model::Mixtral::Logits ComputeLogits(std::int64_t step);

  // Passes from now on make these choices, [T, K] a layer; none: their own.
  void TakeExperts(const std::vector<Tensor>& experts) { local_.model.TakeExperts(experts); }

  struct Loss {
    double total;  // with the auxiliary term
    double aux;
  };
  // Gradients go to the parameters.
  Loss ForwardBackward(std::int64_t step);
  void ZeroGradients() { local_.store.ZeroGradients(); }

  // Norm of the gradients before clipping, then the update with them.
  double ComputeGradNorm() { return optimizer_.ComputeGradNorm(); }
  void Update() {
    optimizer_.Update(folder_.lr);
    scaling_.EndStep(ctx_);
  }

  const std::vector<nn::LocalParameterStore::Parameter>& parameters() {
    return local_.store.parameters();
  }

 private:
  ops::Context ctx_;
  const GoldenFolder& folder_;
  quant::Recipe recipe_;
  quant::ScalingStates scaling_;
  model::LocalMixtral local_;
  optim::AdamWOptimizer optimizer_;
};

// What an implementation would choose instead of the experts of a step ([T, K] a layer), by its
// router logits [T, E]: for tests.
using Rechoose = std::function<void(std::int64_t step, const std::vector<Tensor>& router_logits,
                                    std::vector<Tensor>& experts)>;
// VerifyModel (verify.h) with such choices, which takes the reference's router.
VerifyReport VerifyModel(const ops::Context& ctx, const std::filesystem::path& directory,
                         const VerifyPrecision& precision, const Rechoose& rechoose);

}  // namespace cistron::train
