#include "cistron/train/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>

#include "cistron/base/threads.h"
#include "cistron/comm/nccl/nccl.h"
#include "cistron/ops/attention/attention_cudnn_shape.h"
#include "cistron/ops/cross_entropy/cross_entropy_impls.h"
#include "cistron/ops/grouped_mlp/grouped_mlp.h"
#include "cistron/ops/grouped_mlp/row_pieces.h"
#include "cistron/tensor/block_size.h"
#include "cistron/train/training_step.h"

namespace cistron::train {
namespace {

using Block = MemoryLedger::Block;
using enum MemoryKind;

std::int64_t Exactly(std::int64_t bytes) {
  return bytes;
}
std::int64_t AsOnCpu(std::int64_t bytes) {
  return CpuBlockBytes(bytes);
}

// Of a GPU: cuBLAS's (ops/gemm/gemm_cublas.cc).
constexpr std::int64_t kCublasWorkspace = std::int64_t{32} << 20;

// Of host collectives: HostCommunicator's scratch.
constexpr std::int64_t kHostScratch = std::int64_t{4} << 20;

// What a parameter's memory is told apart by.
const char* GroupOf(const std::string& parameter) {
  if (parameter.find("experts.") != std::string::npos) return "experts";
  if (parameter.find("self_attn.") != std::string::npos) return "attention";
  if (parameter.find("embed") != std::string::npos) return "embedding and head";
  if (parameter.find("lm_head") != std::string::npos) return "embedding and head";
  return "router and norms";
}

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

class Step {
 public:
  explicit Step(const MemoryProblem& p)
      : p_(p),
        c_(p.model),
        ledger_(p.device == DeviceType::kCpu ? AsOnCpu : Exactly),
        cuda_(p.device == DeviceType::kCuda),
        quantizes_(quant::Quantizes(MakeRecipe(p.precision, p.recipe))) {
    const DType dtype = ModelDType(p.precision);
    size_ = static_cast<std::int64_t>(SizeOf(dtype));
    compute_ = static_cast<std::int64_t>(SizeOf(ComputeType(dtype)));
    if (quantizes_) {
      // One scale a block; both directions of each tensor where they differ.
      const QuantizedLayout layout =
          quant::LayoutOf(MakeRecipe(p.precision, p.recipe), quant::TensorRole::kInput);
      copies_ = IsDirectionless(layout.scaling) ? 1 : 2;
      const std::int64_t block = BlockSize(layout.scaling);
      scale_ratio_ = block == 0 ? 0 : layout.scaling == Scaling::kMxfp8 ? 1.0 / 32 : 4.0 / 128;
    }
  }

  MemoryPlan Run() {
    ledger_.At("the first step");
    Parameters();
    Pass(p_.tokens, /*training=*/true);
    if (p_.eval_tokens > 0) Pass(p_.eval_tokens, /*training=*/false);
    MemoryPlan plan;
    plan.peak_bytes = ledger_.peak();
    plan.where = ledger_.where();
    plan.most_dispatch_bytes = ledger_.most_of(kDispatch);
    plan.terms = ledger_.at_peak();
    std::erase_if(plan.terms, [](const MemoryTerm& t) { return t.bytes == 0; });
    std::stable_sort(plan.terms.begin(), plan.terms.end(),
                     [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    return plan;
  }

 private:
  // What a layer keeps for backward.
  struct Kept {
    std::vector<Block> attention, moe;
    Block input;  // of what backward computes again
  };

  Block Take(MemoryKind kind, const char* name, std::int64_t bytes) {
    return ledger_.Take(kind, name, bytes);
  }
  Block Work(const char* name, std::int64_t bytes) { return Take(kWorkspaces, name, bytes); }
  Block Keep(const char* name, std::int64_t bytes) { return Take(kActivations, name, bytes); }
  std::int64_t Codes(std::int64_t values) const {
    return values + static_cast<std::int64_t>(static_cast<double>(values) * scale_ratio_);
  }

  void Parameters() {
    for (const model::ParameterInfo& parameter : model::MixtralParameters(c_)) {
      const std::int64_t n = ElementsOfRank(p_, parameter);
      const std::string group = GroupOf(parameter.name);
      const std::int64_t whole =  // codes are not sharded
          parameter.shape.numel() / (IsRoutedExpert(parameter.name) ? p_.ep : 1);
      const auto take = [&](MemoryKind kind, std::int64_t bytes) {
        lasting_.push_back(ledger_.Take(kind, group, bytes));
      };
      take(kWeights, n * size_);
      const bool masters = p_.states == OptimStates::kF32;
      if (compute_ != size_ && masters) take(kMasters, n * compute_);
      for (int moment = 0; moment < 2; ++moment) take(kMoments, n * (masters ? compute_ : size_));
      take(kGradients, n * GradientSize(p_, parameter));
      if (quantizes_ && parameter.name.find("_proj") != std::string::npos) {
        for (int copy = 0; copy < copies_; ++copy) {
          lasting_.push_back(ledger_.Take(kWeights, "quantised copies of " + group, Codes(whole)));
        }
      }
    }
    // Cosines and sines of every position.
    const auto positions =
        std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(p_.length, 1)));
    const std::int64_t table = static_cast<std::int64_t>(positions) * c_.HeadDim() * compute_;
    lasting_.push_back(Work("rotary table", table));
    if (cuda_) lasting_.push_back(Work("cuBLAS", kCublasWorkspace));
    if (p_.Ranks() > 1) Communication();
  }

  void Communication() {
    const auto take = [&](const char* name, std::int64_t bytes) {
      lasting_.push_back(Take(kCommunication, name, bytes));
    };
    take("collectives", cuda_ ? kCollectiveReserve : kHostScratch);
    if (cuda_) take("sums of gradients", SumScratch());
    if (p_.sharding != Sharding::kFull) return;
    // Whole weights of those in use and of the next, and whole gradients on their way to the
    // shards: no more than those of a layer. With several micro-batches whole gradients add up
    // until the last.
    std::map<std::int64_t, std::int64_t> weights, gradients;  // bytes, by layer
    std::int64_t all = 0;
    const auto add = [](std::int64_t layer, std::int64_t bytes, std::int64_t& sum) {
      sum = layer >= 0 ? sum + bytes : std::max(sum, bytes);
    };
    for (const model::ParameterInfo& parameter : model::MixtralParameters(c_)) {
      const bool expert = IsRoutedExpert(parameter.name);
      if (expert && p_.dp == 1) continue;
      const std::int64_t layer = LayerOf(parameter.name);
      const std::int64_t n = parameter.shape.numel() / (expert ? p_.ep : 1);
      const std::int64_t gradient = n * GradientSize(p_, parameter);
      all += gradient;
      add(layer, n * size_, weights[layer]);
      add(layer, gradient, gradients[layer]);
    }
    const auto largest = [](const std::map<std::int64_t, std::int64_t>& layers) {
      std::int64_t most = 0;
      for (const auto& [layer, bytes] : layers) most = std::max(most, bytes);
      return most;
    };
    take("gathered weights", largest(weights));
    take("gradients to reduce", p_.one_micro_batch ? largest(gradients) : all);
  }

  // Where more than two GPUs have a gradient, sums in their order take memory beside it, as much as
  // the largest of those that are under way together (comm/nccl/nccl.h).
  std::int64_t SumScratch() const {
    std::int64_t dense = 0, experts = 0;
    for (const model::ParameterInfo& parameter : model::MixtralParameters(c_)) {
      const bool expert = IsRoutedExpert(parameter.name);
      if ((expert ? p_.dp : p_.Ranks()) <= 2) continue;
      const std::int64_t bytes =
          parameter.shape.numel() / (expert ? p_.ep : 1) * GradientSize(p_, parameter);
      std::int64_t& largest = expert ? experts : dense;
      largest = std::max(largest, std::min(bytes, comm::nccl::kSumScratchBytes));
    }
    return dense + experts;
  }

  // Widths of a row.
  std::int64_t QueryWidth() const { return c_.num_attention_heads * c_.HeadDim(); }
  std::int64_t KeyWidth() const { return c_.num_key_value_heads * c_.HeadDim(); }

  // A CPU rounds a product in bf16 from a matrix of fp32 sums.
  Block Product(std::int64_t rows, std::int64_t cols) {
    return Work("sums of products", cuda_ || size_ == 4 ? 0 : rows * cols * 4);
  }
  // What a linear layer keeps of its input besides the input itself.
  Block QuantizedInput(std::int64_t values) {
    return quantizes_ ? Keep("quantised inputs", Codes(values)) : Block();
  }

  Block Attention(std::int64_t tokens, std::vector<Block>& kept, bool keep, const Block& x) {
    const MemoryKind kind = keep ? kActivations : kWorkspaces;
    const char* const name = "attention: q, k, v, o";
    std::vector<Block> record;
    if (!quantizes_) record.push_back(x);
    for (const std::int64_t width : {QueryWidth(), KeyWidth(), KeyWidth(), QueryWidth()}) {
      record.push_back(Take(kind, name, tokens * width * size_));
    }
    Product(tokens, QueryWidth());
    if (keep) {
      record.push_back(QuantizedInput(tokens * c_.hidden_size));
      record.push_back(QuantizedInput(tokens * QueryWidth()));
      record.push_back(Keep("attention: log-sum-exp", c_.num_attention_heads * tokens * compute_));
    }
    AttentionWorkspace(tokens, /*backward=*/false);
    Block y = Work("residual stream", tokens * c_.hidden_size * size_);
    Product(tokens, c_.hidden_size);
    if (keep) kept.insert(kept.end(), record.begin(), record.end());
    return y;
  }

  // On a GPU. Sequences are taken to be as long as the rows of a batch.
  void AttentionWorkspace(std::int64_t tokens, bool backward) {
    if (!cuda_) return;
    const ops::AttentionProblem problem{
        .dtype = ModelDType(p_.precision),
        .config = {.num_heads = c_.num_attention_heads,
                   .num_kv_heads = c_.num_key_value_heads,
                   .head_dim = c_.HeadDim(),
                   .window = c_.sliding_window.value_or(0)},
        .tokens = tokens,
        .num_sequences = std::max<std::int64_t>(1, tokens / std::max<std::int64_t>(p_.length, 1)),
        .max_length = p_.length,
        .uniform = true};
    // Row sums, and with cuDNN a log-sum-exp in its own order.
    std::int64_t bytes = c_.num_attention_heads * tokens * 4 * (backward ? 2 : 1);
    const auto impls = ops::AttentionImplsFor(problem);
    const auto used = std::find_if(impls.begin(), impls.end(), [&](const ops::AttentionImpl& impl) {
      return impl.device == DeviceType::kCuda && impl.supports(problem);
    });
    if (backward && used != impls.end() && used->name == "cudnn") {
      // Gradients of scores, of as many heads as a launch takes.
      const ops::internal::CudnnShape shape = ops::internal::CudnnShapeOf(problem);
      bytes += ops::internal::CudnnScoreBytes(
          shape, ops::internal::CudnnHeadsAtOnce(problem.config, shape) *
                     (c_.num_attention_heads / c_.num_key_value_heads));
    }
    Work("attention", bytes);
  }

  // The expert MLP's forward pass; returns its output rows.
  Block Experts(std::int64_t rows, std::vector<Block>& kept, bool keep, const Block& x) {
    const std::int64_t f = c_.intermediate_size, h = c_.hidden_size;
    Block y = Work("rows of experts", rows * h * size_);
    std::vector<Block> temporary;
    std::vector<Block> record{x};
    if (quantizes_) {
      record = {Keep("quantised inputs", Codes(rows * h))};
      if (copies_ == 2) temporary.push_back(Work("quantised rows", Codes(rows * h)));
    }
    const MemoryKind kind = keep ? kActivations : kWorkspaces;
    // A CPU keeps no whole pre-activation unless backward needs it.
    const bool whole = keep || (cuda_ && !FusesExperts(rows));
    Block pre = Take(kind, "experts: pre-activations", whole ? rows * 2 * f * size_ : 0);
    if (cuda_) {
      temporary.push_back(Work("experts: activations", rows * f * size_));
    } else {
      temporary.push_back(CpuExperts(rows, /*backward=*/false));
    }
    if (keep) {
      kept.insert(kept.end(), record.begin(), record.end());
      kept.push_back(pre);
    }
    return y;
  }

  // Whether the kernel in use makes dA and dP in one.
  bool FusesExperts(std::int64_t rows) const {
    const ops::GroupedMlpProblem problem{
        ModelDType(p_.precision), c_.num_local_experts / p_.ep, rows,
        c_.hidden_size,           c_.intermediate_size,         c_.hidden_size};
    for (const ops::GroupedMlpImpl& impl : ops::GroupedMlpImpls()) {
      if (impl.device == DeviceType::kCuda && impl.supports(problem)) return impl.name == "hopper";
    }
    return false;
  }

  // On a CPU a thread (or under a recipe a wave of experts) goes through all of the MLP.
  Block CpuExperts(std::int64_t rows, bool backward) {
    const std::int64_t f = c_.intermediate_size, h = c_.hidden_size;
    const std::int64_t of_expert = CeilDiv(rows, c_.num_local_experts / p_.ep);
    // Weights transposed in fp32, or sums in fp32, and a chunk of rows.
    const std::int64_t chunk = std::min<std::int64_t>(of_expert, size_ == 4 ? 192 : 448);
    const std::int64_t sums = chunk * (f * 2 + std::max(2 * f, h) * 4);
    const auto wave = [&](std::int64_t row_bytes) {
      return std::min(rows, std::max(of_expert, ops::internal::WaveRows(row_bytes)));
    };
    std::int64_t bytes = 0;
    if (quantizes_) {
      // Activations and their codes; the weights of an expert decoded.
      const std::int64_t planned = f * (backward ? 4 * size_ + 5 : size_ + 1);
      const std::int64_t row_bytes = f * (backward ? 4 * size_ + 2 * copies_ + 1 : size_ + 1);
      bytes = wave(planned) * row_bytes + 2 * f * h * size_ + p_.threads * sums / 2;
    } else if (backward) {
      const std::int64_t row_bytes = 3 * f * size_;
      bytes = wave(row_bytes) * row_bytes +
              p_.threads * chunk * (size_ == 4 ? f * 4 : f * 2 + std::max(f, h) * 4);
    } else {
      bytes = p_.threads * (size_ == 4 ? (3 * f * h + chunk * f) * 4 : sums);
    }
    return Work("experts: activations", bytes);
  }

  // x, which the gate keeps, to y.
  Block Moe(std::int64_t tokens, std::vector<Block>& kept, bool keep, const Block& given,
            std::vector<Block>& routing) {
    const std::int64_t e = c_.num_local_experts, k = c_.num_experts_per_tok;
    const std::int64_t rows = tokens * k;
    Block x = given;
    if (c_.router_jitter_noise > 0) {
      x = Take(keep ? kActivations : kWorkspaces, "router: input with noise",
               tokens * c_.hidden_size * size_);
    }
    const MemoryKind kind = keep ? kActivations : kWorkspaces;
    std::vector<Block> record{x};
    for (const std::int64_t bytes :
         {tokens * e * size_, rows * 4, rows * compute_, 2 * rows * 4, rows * compute_}) {
      record.push_back(Take(kind, "routing", bytes));
    }
    Product(tokens, e);
    routing.insert(routing.end(), record.begin() + 1, record.begin() + 4);
    if (cuda_) Work("router", tokens * (3 * compute_ + 1));
    const std::int64_t expert_rows = p_.ExpertRows(tokens);
    Block permuted = Dispatch(rows, expert_rows, keep && !quantizes_ ? kActivations : kWorkspaces,
                              "rows of experts");
    Block out = Experts(expert_rows, record, keep, permuted);
    const Block returned = Return(rows, expert_rows);
    Block y = Work("residual stream", tokens * c_.hidden_size * size_);
    if (c_.n_shared_experts > 0) Shared(tokens, record, keep);
    if (keep) kept.insert(kept.end(), record.begin(), record.end());
    return y;
  }

  // Rows in the order of this rank's experts, as parallel/expert_parallel_dispatcher.cc makes them:
  // by expert of all ranks, exchanged, by expert of this one.
  Block Dispatch(std::int64_t rows, std::int64_t expert_rows, MemoryKind kind, const char* name) {
    const std::int64_t row = c_.hidden_size * size_;
    if (p_.ep == 1) return Take(kind, name, rows * row);
    const Block sent = Take(kDispatch, "rows sent", rows * row);
    const Block received = Take(kDispatch, "rows received", expert_rows * row);
    return Take(kind, name, expert_rows * row);
  }
  // The way back; nothing where all experts are here.
  Block Return(std::int64_t rows, std::int64_t expert_rows) {
    const std::int64_t row = c_.hidden_size * size_;
    if (p_.ep == 1) return {};
    const Block sent = Take(kDispatch, "rows sent", expert_rows * row);
    return Take(kDispatch, "rows received", rows * row);
  }

  void Shared(std::int64_t tokens, std::vector<Block>& record, bool keep) {
    const std::int64_t f = c_.n_shared_experts * c_.intermediate_size;
    record.push_back(Take(keep ? kActivations : kWorkspaces, "shared expert: pre-activations",
                          tokens * 2 * f * size_));
    Work("shared expert: activations", tokens * (f + c_.hidden_size) * size_);
  }

  // A norm: its output and the stream that it normalises.
  struct Normed {
    Block y, h;
  };
  Normed Norm(std::int64_t tokens, std::vector<Block>& kept, bool keep, const Block& x, bool adds) {
    const std::int64_t bytes = tokens * c_.hidden_size * size_;
    Normed r;
    r.y = Take(keep ? kActivations : kWorkspaces, "outputs of norms", bytes);
    r.h = adds ? Take(keep ? kActivations : kWorkspaces, "residual stream", bytes) : x;
    if (keep) {
      kept.push_back(r.h);
      kept.push_back(Keep("residual stream", tokens * compute_));
    }
    return r;
  }

  void Pass(std::int64_t tokens, bool training) {
    const auto layers = static_cast<std::size_t>(c_.num_hidden_layers);
    const std::int64_t stream = tokens * c_.hidden_size * size_;
    Block batch;
    if (cuda_) batch = Work("batch", tokens * 28);
    std::vector<Kept> kept(layers);
    std::vector<Block> final_kept, routing;
    Block hidden;
    {
      Block x = Work("residual stream", stream);
      bool first = true;
      for (std::size_t i = 0; i < layers; ++i) {
        ledger_.At(fmt::format("forward of layer {}", i));
        Layer(tokens, training, x, first, routing, kept[i]);
        first = false;
      }
      hidden = Norm(tokens, final_kept, training, x, true).y;
      stream_.reset();
    }
    const std::int64_t vocab = c_.vocab_size;
    Block nll = Work("losses of tokens", tokens * compute_);
    ledger_.At("linear cross-entropy");
    const std::int64_t chunk =
        std::min(tokens, cuda_ ? ops::CrossEntropyCudaChunk(vocab) : ops::CrossEntropyChunk(vocab));
    Block dstream;
    if (training) dstream = Work("gradients of activations", stream);
    {
      const Block logits = Take(kLogits, "logits", chunk * vocab * compute_);
      const Block gradients = Take(kLogits, "gradients of logits",
                                   training && size_ != compute_ ? chunk * vocab * size_ : 0);
      Product(chunk, c_.hidden_size);
    }
    hidden.reset();
    routing.clear();
    if (!training) return;
    dstream = NormBackward(tokens);
    final_kept.clear();
    for (std::size_t i = layers; i-- > 0;) {
      ledger_.At(fmt::format("backward of layer {}", i));
      LayerBackward(tokens, kept[i], dstream);
    }
  }

  // x, the branch added last, becomes that of this layer; the stream itself is in Kept.
  void Layer(std::int64_t tokens, bool training, Block& x, bool first, std::vector<Block>& routing,
             Kept& kept) {
    const bool keep_attention = training && p_.recompute != model::Recompute::kLayer;
    const bool keep_moe = training && p_.recompute == model::Recompute::kNone;
    std::vector<Block> dropped;
    std::vector<Block>& attention = keep_attention ? kept.attention : dropped;
    std::vector<Block>& moe = keep_moe ? kept.moe : dropped;
    const Normed before = Norm(tokens, attention, training, x, !first);
    x = Attention(tokens, attention, training, before.y);
    const Normed before_moe = Norm(tokens, attention, training, x, true);
    x = Moe(tokens, moe, training, before_moe.y, routing);
    stream_ = before_moe.h;
    if (training && p_.recompute == model::Recompute::kMoe) kept.input = before_moe.y;
    if (training && p_.recompute == model::Recompute::kLayer) kept.input = before.h;
  }

  Block NormBackward(std::int64_t tokens) {
    return Work("gradients of activations", tokens * c_.hidden_size * size_);
  }

  void LayerBackward(std::int64_t tokens, Kept& kept, Block& dstream) {
    const std::int64_t stream = tokens * c_.hidden_size * size_;
    if (p_.recompute != model::Recompute::kNone) {
      std::vector<Block> routing;
      Block x = std::move(kept.input);
      if (p_.recompute == model::Recompute::kLayer) {
        const Normed before = Norm(tokens, kept.attention, true, x, false);
        x = Attention(tokens, kept.attention, true, before.y);
        x = Norm(tokens, kept.attention, true, x, true).y;
      }
      Moe(tokens, kept.moe, true, x, routing);
    }
    Block dy = MoeBackward(tokens, kept.moe);
    dstream = NormBackward(tokens);
    {
      // d_o, dq, dk, dv beside the record.
      std::vector<Block> gradients;
      for (const std::int64_t width : {QueryWidth(), QueryWidth(), KeyWidth(), KeyWidth()}) {
        gradients.push_back(Work("gradients of activations", tokens * width * size_));
      }
      AttentionWorkspace(tokens, /*backward=*/true);
      dy = Work("gradients of activations", stream);
      Product(tokens, c_.hidden_size);
      kept.attention.clear();
    }
    dstream = NormBackward(tokens);
  }

  Block MoeBackward(std::int64_t tokens, std::vector<Block>& kept) {
    const std::int64_t sent = tokens * c_.num_experts_per_tok, f = c_.intermediate_size;
    const std::int64_t rows = p_.ExpertRows(tokens);
    const char* const name = "gradients of activations";
    const std::int64_t wide = rows * c_.hidden_size * size_;
    Block dout = Dispatch(sent, rows, kWorkspaces, name), drows;
    const Block dprobs = Work(name, rows * compute_);
    if (cuda_) {
      // dP in the place of P, or beside it and dA.
      const Block dpre = Work(name, FusesExperts(rows) ? 0 : rows * 2 * f * size_);
      const Block act = Work("experts: activations", rows * f * size_);
      if (!FusesExperts(rows)) Work(name, rows * f * size_);
    } else {
      drows = Work(name, wide);
      std::vector<Block> codes;
      for (int copy = 0; quantizes_ && copy < copies_; ++copy) {
        codes.push_back(Work("quantised rows", Codes(rows * c_.hidden_size)));
      }
      const Block pieces = CpuExperts(rows, /*backward=*/true);
    }
    kept.clear();
    if (cuda_) {
      // What was kept goes as it is used, and dout with it.
      dout = Block();
      drows = Work(name, wide);
    }
    Block dx = Work(name, tokens * c_.hidden_size * size_);
    Return(sent, rows);
    Work("router", sent * compute_ + tokens * c_.num_local_experts * size_);
    Product(tokens, c_.hidden_size);
    return dx;
  }

  const MemoryProblem& p_;
  const model::MixtralConfig& c_;
  MemoryLedger ledger_;
  const bool cuda_, quantizes_;
  std::int64_t size_ = 4, compute_ = 4;  // of an element
  int copies_ = 0;
  double scale_ratio_ = 0;
  std::vector<Block> lasting_;
  Block stream_;
};

}  // namespace

std::string_view Name(MemoryKind kind) {
  switch (kind) {
    case kWeights: return "weights";
    case kMasters: return "masters";
    case kMoments: return "moments";
    case kGradients: return "gradients";
    case kActivations: return "activations";
    case kWorkspaces: return "workspaces";
    case kLogits: return "logits";
    case kDispatch: return "dispatch";
    case kCommunication: return "communication";
  }
  return "";
}

std::int64_t MemoryProblem::ExpertRows(std::int64_t of_tokens) const {
  const std::int64_t rows = of_tokens * model.num_experts_per_tok;
  // No rank gets more than all rows of all of them.
  const double capacity = std::min(row_capacity, static_cast<double>(ep));
  return ep == 1 ? rows
                 : static_cast<std::int64_t>(std::ceil(static_cast<double>(rows) * capacity));
}

bool IsRoutedExpert(const std::string& parameter) {
  return parameter.find(".mlp.experts.") != std::string::npos;  // a shared one is dense
}

std::int64_t GradientSize(const MemoryProblem& p, const model::ParameterInfo& parameter) {
  // As LocalParameterStore::SetGradientDType.
  const bool matrix = parameter.shape.rank() >= 2 && parameter.name != "lm_head.weight" &&
                      parameter.name != "model.embed_tokens.weight";
  return static_cast<std::int64_t>(
      SizeOf(matrix ? GradientDType(p.precision, p.states, p.gradients, p.whole_batch)
                    : ComputeType(ModelDType(p.precision))));
}

std::int64_t ElementsOfRank(const MemoryProblem& p, const model::ParameterInfo& parameter) {
  const bool expert = IsRoutedExpert(parameter.name), shards = p.sharding == Sharding::kFull;
  const std::int64_t n = parameter.shape.numel() / (expert ? p.ep : 1);
  return CeilDiv(n, !shards ? 1 : expert ? p.dp : p.Ranks());
}

MemoryProblem MemoryProblemOf(const RunConfig& c) {
  const std::int64_t micro = c.RowsPerMicroBatch() * c.data.seq_len;
  const bool evaluates = c.data.split.kind != data::SplitRule::Kind::kNone;
  return {.model = c.model,
          .precision = c.precision,
          .recipe = c.recipe,
          .states = c.optim.states,
          .gradients = c.optim.gradients,
          .recompute = c.recompute,
          .device = c.ComputeDevice().type,
          .tokens = micro,
          .one_micro_batch = c.OneMicroBatch(),
          .whole_batch = c.WholeBatch(),
          .length = c.data.seq_len,
          .eval_tokens = evaluates ? c.EvaluationTokens() : 0,
          .threads = c.threads > 0 ? c.threads : NumThreads(),
          .dp = c.parallel.dp,
          .ep = c.parallel.ep,
          .sharding = c.parallel.shard,
          .ep_rows = c.parallel.ep_rows,
          .row_capacity = c.device == DeviceChoice::kCuda && c.WhyRowsByHost().empty()
                              ? c.parallel.ep_buffer_factor
                              : 1.0};
}

std::int64_t MemoryPlan::Of(MemoryKind kind) const {
  std::int64_t sum = 0;
  for (const MemoryTerm& t : terms) sum += t.kind == kind ? t.bytes : 0;
  return sum;
}

MemoryPlan PlanMemory(const MemoryProblem& problem) {
  return Step(problem).Run();
}

}  // namespace cistron::train
