// Parameters and who holds them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/nn/rank_exchange.h"
#include "cistron/ops/context.h"
#include "cistron/quant/recipe.h"
#include "cistron/quant/scaling_states.h"
#include "cistron/tensor/quantized_tensor.h"
#include "cistron/tensor/tensor.h"

namespace cistron::nn {

// What a module asks of a parameter when it is built. Names are canonical: those of transformers 5
// in memory, e.g. "model.layers.0.mlp.experts.gate_up_proj".
struct ParameterSpec {
  std::string name;
  Shape shape;  // global shape
  enum class Init { kNormal, kOnes, kZeros } init = Init::kNormal;
  bool is_expert = false;  // first dimension counts experts, which expert parallelism divides
  // Weight decay by default: matrices yes, norms and biases no; embeddings only on request.
  bool decays = true;
  bool is_embedding = false;
  // Its gradient is a sum of several products, and stays in the compute type.
  bool wide_gradient = false;
  // Equal parts of the rows of each matrix whose quantisation blocks lie apart: 2 where gate and up
  // rows share a weight.
  std::int64_t row_parts = 1;

  // Whether its gradient may be in the model's dtype.
  bool HasNarrowGradient() const {
    return shape.rank() >= 2 && decays && !is_embedding && !wide_gradient;
  }
};

// State of a module that is not trained: it moves by a rule of its own, has no gradient, and is in
// checkpoints. Zero at first, in the compute type, whole on every rank.
struct BufferSpec {
  std::string name;
  Shape shape;
};

// Handle of a parameter in its store.
using ParameterId = int;

// Which part of the parameters one of several ranks holds; parallel/ derives it from the mesh.
struct ParameterPartition {
  // Experts [rank·E/ranks, (rank + 1)·E/ranks) of every parameter with is_expert; all else whole.
  std::int64_t expert_ranks = 1, expert_rank = 0;
  // Of the ranks that hold the same values one counts them: in the gradient norm, in a checkpoint.
  bool counts_dense = true, counts_experts = true;
  // Into how many shards those ranks cut a parameter, and which is here. Shards are runs of whole
  // rows (slices of the last dimension), as even as can be; some may be empty.
  struct Shards {
    std::int64_t ranks = 1, rank = 0;
  };
  Shards dense{}, experts{};
  // Null where this rank is alone. Must outlive the store.
  RankExchange* exchange = nullptr;
};

// Holds weights and gradients for the modules. A module acquires what it needs around its forward
// and backward pass and hands in gradients; whether the store keeps whole tensors here or gathers
// them from other ranks is its own business (parallel/ implements the latter).
class ParameterStore {
 public:
  virtual ~ParameterStore() = default;

  virtual ParameterId Register(const ParameterSpec& spec) = 0;
  // The tensor of the buffer, which the module and the store share.
  virtual Tensor RegisterBuffer(const BufferSpec& spec) = 0;

  // The weight in the model's dtype, valid until Release.
  virtual Tensor Acquire(ParameterId id) = 0;
  virtual void Release(ParameterId id) = 0;

  // The weight with the copies that `recipe` needs for forward and backward, valid until the
  // weights change. It is quantised from the master, once for each change of the weights or of
  // their delayed scales, however many micro-batches use it.
  virtual QuantizedTensor AcquireQuantized(ParameterId id, const quant::Recipe& recipe) = 0;

  // Counts the changes of the weights: what backward needs must be of the weights of its forward.
  virtual std::uint64_t version() const = 0;

  virtual const ParameterSpec& spec(ParameterId id) const = 0;
  // Shape of what Acquire returns: spec().shape, but of this rank's experts alone.
  virtual Shape LocalShape(ParameterId id) const = 0;
  // Replaces ParameterSpec::row_parts, before the first pass.
  virtual void SetRowParts(ParameterId id, std::int64_t parts) = 0;

  // Where a gradient goes: Write for the first of a step, Accumulate afterwards. The dtype is the
  // compute type. The gradient counts as contributed when the call that uses it returns.
  virtual ops::Output GradientOutput(ParameterId id) = 0;
  // Whoever runs a backward pass may say that every gradient asked for so far is written: a store
  // that sums them over ranks can begin.
  virtual void GradientsWritten() {}
  // Whoever wrote (not accumulated) a whole gradient may leave partial sums of its squares, f64 [n]
  // in a fixed order, so that the norm need not read it again. They count until the gradient is
  // written to again; a store that cannot use them ignores them, and says so.
  virtual void OfferSquareSums(ParameterId, const Tensor&) {}
  virtual bool takes_square_sums() const { return false; }
};

// Throws, naming `op`, unless the weights are those of the forward pass: every op whose backward
// reads a weight records version() in forward and checks it in backward.
void CheckVersionOfForward(const ParameterStore& store, std::uint64_t version_of_forward,
                           std::string_view op);

// A weight held for the length of a scope.
class AcquiredWeight {
 public:
  AcquiredWeight(ParameterStore& store, ParameterId id)
      : store_(store), id_(id), tensor_(store.Acquire(id)) {}
  ~AcquiredWeight() { store_.Release(id_); }
  AcquiredWeight(const AcquiredWeight&) = delete;
  AcquiredWeight& operator=(const AcquiredWeight&) = delete;

  const Tensor& tensor() const { return tensor_; }

 private:
  ParameterStore& store_;
  ParameterId id_;
  Tensor tensor_;
};

class GatheredWeights;
class GradientTransfers;

// All parameters that this rank holds, on its device: whole, its experts, or its shards of them
// (ParameterPartition). Modules see whole weights of its experts, gathered while they hold them.
class LocalParameterStore final : public ParameterStore {
 public:
  struct Parameter {
    ParameterSpec spec;
    Shape start, local_shape;  // the box of the global tensor that modules see here
    bool counted = true;       // here, not by another rank that holds the same values
    // Elements of each rank's shard of that box, and where this rank's begins in it. Empty: not
    // sharded. `value`, `master`, `grad` of a shard are [rows, last dimension].
    std::vector<std::int64_t> shard_counts{};
    std::int64_t shard_begin = 0;
    bool IsSharded() const { return !shard_counts.empty(); }
    Tensor whole_grad{};  // of a sharded parameter, until it is reduced

    Tensor value;  // model dtype: what the modules compute with
    // What the optimiser updates: compute type; the same tensor as `value` where dtypes agree or
    // the store has no masters.
    Tensor master;
    Tensor grad;  // allocated at the first gradient
    bool has_grad = false;
    Tensor square_sums{};  // OfferSquareSums, of the gradient as it is now
    // Quantised copies of the weights of one version.
    struct QuantizedWeight {
      quant::Recipe recipe;
      QuantizedTensor tensor;
      std::uint64_t version = 0;
      // ScalingStates::version() of those that gave the scale and took the amax; 0 without.
      std::uint64_t scales = 0;
    };
    QuantizedWeight quantized{};
  };

  struct Buffer {
    std::string name;
    Tensor value;
  };

  // `dtype` is the model's: f64, f32 or bf16. Without `masters` a bf16 model's optimiser updates
  // the bf16 values themselves.
  LocalParameterStore(const ops::Context& ctx, DType dtype, bool masters = true,
                      const ParameterPartition& partition = {});

  ParameterId Register(const ParameterSpec& spec) override;
  Tensor RegisterBuffer(const BufferSpec& spec) override;
  ~LocalParameterStore() override;
  LocalParameterStore(LocalParameterStore&&) = delete;

  Tensor Acquire(ParameterId id) override;
  void Release(ParameterId id) override;
  QuantizedTensor AcquireQuantized(ParameterId id, const quant::Recipe& recipe) override;
  std::uint64_t version() const override { return version_; }
  const ParameterSpec& spec(ParameterId id) const override {
    return parameters_.at(static_cast<std::size_t>(id)).spec;
  }
  Shape LocalShape(ParameterId id) const override {
    return parameters_.at(static_cast<std::size_t>(id)).local_shape;
  }
  void SetRowParts(ParameterId id, std::int64_t parts) override;
  ops::Output GradientOutput(ParameterId id) override;
  void GradientsWritten() override;
  void OfferSquareSums(ParameterId id, const Tensor& sums) override {
    parameters_.at(static_cast<std::size_t>(id)).square_sums = sums;
  }
  bool takes_square_sums() const override { return true; }

  // Of gradients of matrices: the model's dtype, as peers without masters have them, or the compute
  // type, as those of vectors and embeddings are anyway. A sum over micro-batches is rounded to it
  // at each of them, one over ranks once. Before the first gradient.
  void SetGradientDType(DType dtype) { gradient_dtype_ = dtype; }

  // Whoever writes masters or values must say so: quantised copies are made anew.
  void MarkChanged() { ++version_; }

  // Zeroes buffers and draws every parameter: normal(0, std) from the stream (seed, name) at the
  // flat global index; ones; zeros.
  void Initialize(std::uint64_t seed, double std);

  // Sets a parameter or a buffer from exact values of any float dtype, those of all ranks: the
  // master receives its part, the value is rounded from the master. Throws when the name or the
  // shape is not there.
  void Assign(std::string_view name, const Tensor& values);

  // Before anything was computed with the parameter; its values stay. Throws when there is no
  // `from` or there is a `to`.
  void Rename(std::string_view from, std::string_view to);

  // Before the first micro-batch of a step: how many there will be, so that gradients may be summed
  // over ranks while others are still made.
  void ExpectMicroBatches(std::int64_t count);
  // After the last micro-batch of a step, on every rank: gradients are those of the global batch,
  // sums over the ranks in their order. Each rank's was that of the global mean loss by its own
  // tokens, so nothing is divided. Must be called before the optimiser's update.
  void FinishGradients();

  // Forgets the gradients: the next GradientOutput is a Write.
  void ZeroGradients();

  // The boxes of the global tensor whose elements `values` are, a tensor as Parameter::value or
  // master: one, or up to three where a shard begins or ends within an expert. Views of `values`.
  struct Box {
    Tensor values;
    Shape start;
  };
  static std::vector<Box> BoxesOf(const Parameter& p, const Tensor& values);

  DType dtype() const { return dtype_; }
  const ParameterPartition& partition() const { return partition_; }
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  const Parameter* Find(std::string_view name) const;
  Parameter* Find(std::string_view name);
  const Buffer* FindBuffer(std::string_view name) const;

 private:
  ops::Context ctx_;
  DType dtype_;
  bool masters_;
  ParameterPartition partition_;
  DType gradient_dtype_;
  std::uint64_t version_ = 1;
  std::vector<Parameter> parameters_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<GatheredWeights> gathered_;  // null without an exchange
  std::unique_ptr<GradientTransfers> transfers_;
};

// Values of a parameter as Initialize draws them, elements [begin, begin + out.size()) of the flat
// global tensor: a shard draws its own part.
void DrawNormal(std::uint64_t seed, std::string_view name, double std, std::int64_t begin,
                const Tensor& out);

}  // namespace cistron::nn
