// GroupedLinear: one linear layer a group (expert) over ragged rows.
//
//   y[r] = x[r] · w[e]ᵀ + bias_scale[r] · bias[e]       r in group e; bias_scale 1 unless
//   scaled_bias
// Backward: dx = dy · w[e];  dw[e] = dyᵀ · x;  dbias[e] = Σ_r bias_scale[r]·dy[r];
//   d(bias_scale)[r] = ⟨dy[r], bias[e]⟩
// Any counts, empty groups included; rows beyond the sum of split_sizes are left alone.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistron/nn/basic_op.h"
#include "cistron/nn/weight_products.h"

namespace cistron::nn {

struct GroupedLinearOptions {
  std::int64_t num_groups = 0;    // E, of all ranks
  std::int64_t in_features = 0;   // K
  std::int64_t out_features = 0;  // N
  bool bias = false;              // [E, N]
  bool scaled_bias = false;       // the bias is multiplied by bias_scale, one factor a row
  // Equal parts of the output that quantisation blocks apart: 2 where it is [gate | up]. 0: what
  // the next op of a Sequential says (SetOutputParts), 1 without one.
  std::int64_t out_parts = 0;
  bool is_expert = true;  // groups are experts, which expert parallelism divides
  // Weight gradients wait for ComputeWeightGradients, so that what depends on dx can go first.
  bool delay_weight_gradients = false;
  // One parameter [N, K] an expert, NAME0, NAME1, …, instead of one [E, N, K]. The products run
  // expert by expert, with the same codes and sums; what is fused wants one tensor.
  bool per_expert_weights = false;
  // Names of the weight [E, N, K] and of the bias. Empty: "N.weight" for op N of a Sequential, and
  // the weight's name with bias for weight, or _bias behind it. A layer in a store that it was
  // given must be named, and so must a layer by itself that follows DelayedScaling.
  std::string name{};
  std::string bias_name{};
  // Where the parameters live; null: in a store of the op's own, of `dtype`, drawn from
  // normal(0, init_std) of the stream (seed, name).
  ParameterStore* store = nullptr;
  DType dtype = DType::kF32;
  std::uint64_t seed = 0;
  double init_std = 0.02;
};

class GroupedLinear final : public BasicOp {
 public:
  explicit GroupedLinear(const GroupedLinearOptions& options);

  std::string_view kind() const override { return "GroupedLinear"; }
  std::span<const std::string_view> extra_inputs() const override {
    static constexpr std::string_view kInputs[] = {"split_sizes", "bias_scale"};
    return std::span(kInputs).first(options_.scaled_bias ? 2 : 1);
  }
  const std::string& name() const override { return options_.name; }
  const GroupedLinearOptions& options() const { return options_; }
  // Of the one weight tensor; not for per_expert_weights.
  const WeightProducts& products() const { return products_.front(); }
  // Groups whose weights are here, and whose rows a pass takes: E, unless the store divides them.
  std::int64_t local_groups() const { return local_groups_; }
  std::int64_t out_parts() const { return products_.front().spec().row_parts; }
  // Before the first pass. Draws the weights of an unnamed layer by its new name, unless they were
  // assigned since.
  void SetPosition(std::size_t position) override;
  // Before the first pass; without effect where the options chose.
  void SetOutputParts(std::int64_t parts) override;
  void SetOutputInterleave(std::int64_t block) override;

  // x [M, K] → [M, N]; needs split_sizes, and bias_scale where scaled_bias is set.
  Tensor Forward(const ops::Context& ctx, const Tensor& x, const ExtraInputs& extra,
                 Saved* saved) const override;
  Tensor Backward(const ops::Context& ctx, Tensor dy, const BackwardOutputs& out,
                  Saved& saved) const override;

  // For fused ops of one direction: what follows the product in forward (bias, record), and
  // backward with dx made by `dgrad` from dy and split_sizes; the op's record is taken before it is
  // called.
  void FinishForward(const ops::Context& ctx, const quant::Recipe& recipe, Operand& input,
                     const ExtraInputs& extra, Saved* saved, const Tensor& y) const;
  using DgradFunction = std::function<Tensor(const Tensor& dy, const Tensor& split_sizes)>;
  Tensor BackwardWith(const ops::Context& ctx, const Tensor& dy, const BackwardOutputs& out,
                      Saved& saved, const DgradFunction& dgrad) const;

  // The weight gradients that were delayed, in the order of their backward passes; in any autocast
  // scope or none. Throws, and drops them all, when the parameters have changed since.
  void ComputeWeightGradients(const ops::Context& ctx) const;

  // The store of the op's own; null when it was given one.
  LocalParameterStore* own_store() const { return own_store_.get(); }
  // Throws, naming the op, unless x and split_sizes are what it takes.
  void CheckInput(const Tensor& x, const ExtraInputs& extra) const;

 private:
  struct Record {
    std::vector<SavedOperand> x;  // one a weight tensor
    Tensor split_sizes, bias_scale;
    std::int64_t rows = 0;
    std::int64_t bytes() const;
  };
  // Adds the bias and keeps what backward needs.
  void Finish(const ops::Context& ctx, std::vector<SavedOperand> inputs, const ExtraInputs& extra,
              Saved* saved, const Tensor& y) const;

  struct Delayed {
    std::size_t weight;
    Operand dy;
    SavedOperand x;
  };
  // Rows of each weight tensor: all of them, or those of its expert.
  struct Part {
    std::int64_t begin, rows;
    Tensor split_sizes;
  };
  std::vector<Part> Parts(const Tensor& split_sizes, std::int64_t rows) const;

  GroupedLinearOptions options_;
  bool unnamed_ = false, unnamed_bias_ = false;
  std::unique_ptr<LocalParameterStore> own_store_;
  std::uint64_t drawn_version_ = 0;  // of the own store, as the constructor left it
  ParameterStore* store_;
  ParameterId bias_ = -1;
  std::int64_t local_groups_ = 0;
  std::vector<WeightProducts> products_;  // one, or one an expert
  std::unique_ptr<std::vector<Delayed>> delayed_;
};

}  // namespace cistron::nn
