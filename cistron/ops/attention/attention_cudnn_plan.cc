// Attention as graphs of cuDNN, through cudnn-frontend. Its headers take long to compile and are
// included nowhere else. libcudnn is loaded at run time, so that the program starts without it.
//
// Source: cudnn-frontend 1.32, its nodes diagonal_band_mask.h and
// scaled_dot_product_flash_attention.h: a left bound of L leaves the last L keys, the query's own
// among them, as AttentionConfig::window does.
#include "cistron/ops/attention/attention_cudnn_plan.h"

#include <dlfcn.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include "cistron/base/error.h"

// Where cudnn-frontend looks for cuDNN's functions; it leaves the definition to its user.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace cistron::ops::internal {
namespace {

namespace fe = cudnn_frontend;
using TensorRef = std::shared_ptr<fe::graph::Tensor_attributes>;

// The oldest one that was tried. Before 9.16 frontend repairs lengths that are no multiple of 128
// by copies from host memory.
constexpr std::size_t kOldestCudnn = 91900;

std::string VersionName(std::size_t v) {
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

// Names of tensors in a graph. Offsets of operand i have kOffsets + i.
enum Uid : std::int64_t { kMatrices = 1, kStats = 100, kLengths, kOffsets = 200 };

bool Has(const CudnnPlanKey& key, CudnnOperand operand) {
  return key.backward || operand <= CudnnOperand::kO;
}

// Builds one graph.
class GraphBuilder {
 public:
  explicit GraphBuilder(const CudnnPlanKey& key)
      : key_(key), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (key.ragged) {
      lengths_ = graph_->tensor(fe::graph::Tensor_attributes()
                                    .set_name("lengths")
                                    .set_uid(kLengths)
                                    .set_dim({key.batch, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(fe::DataType_t::INT32));
    }
  }

  std::shared_ptr<fe::graph::Graph> Build() {
    const TensorRef q = Input(CudnnOperand::kQ, key_.heads);
    const TensorRef k = Input(CudnnOperand::kK, key_.kv_heads);
    const TensorRef v = Input(CudnnOperand::kV, key_.kv_heads);
    if (!key_.backward) {
      auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
      SetCommon(options);
      auto [o, stats] = graph_->sdpa(q, k, v, options);
      Output(CudnnOperand::kO, key_.heads, o);
      stats->set_output(true).set_data_type(fe::DataType_t::FLOAT).set_uid(kStats);
      stats->set_dim({key_.batch, key_.heads, key_.length, 1})
          .set_stride({key_.heads * key_.length, key_.length, 1, 1});
      return graph_;
    }
    const TensorRef o = Input(CudnnOperand::kO, key_.heads);
    const TensorRef d_o = Input(CudnnOperand::kDO, key_.heads);
    const TensorRef stats =
        graph_->tensor(fe::graph::Tensor_attributes()
                           .set_name("stats")
                           .set_uid(kStats)
                           .set_dim({key_.batch, key_.heads, key_.length, 1})
                           .set_stride({key_.heads * key_.length, key_.length, 1, 1})
                           .set_data_type(fe::DataType_t::FLOAT));
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_deterministic_algorithm(key_.deterministic);
    SetCommon(options);
    if (key_.ragged) {
      // Buffers of the sequences' rows, not of batch · length rows.
      options.set_max_total_seq_len_q(key_.tokens).set_max_total_seq_len_kv(key_.tokens);
    }
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, o, d_o, stats, options);
    Output(CudnnOperand::kDQ, key_.heads, dq);
    Output(CudnnOperand::kDK, key_.kv_heads, dk);
    Output(CudnnOperand::kDV, key_.kv_heads, dv);
    return graph_;
  }

 private:
  template <class Options>
  void SetCommon(Options& options) const {
    options.set_attn_scale(static_cast<float>(1 / std::sqrt(static_cast<double>(key_.head_dim))))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (key_.window != 0) options.set_diagonal_band_left_bound(static_cast<int>(key_.window));
    if (key_.ragged) {
      options.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
    }
  }

  // Sizes, strides and offsets of heads beside each other in the rows of a matrix.
  void Describe(CudnnOperand operand, std::int64_t heads, fe::graph::Tensor_attributes& t) const {
    const auto index = static_cast<std::int64_t>(operand);
    const std::int64_t row = key_.row_strides[static_cast<std::size_t>(index)];
    t.set_uid(kMatrices + index)
        .set_dim({key_.batch, heads, key_.length, key_.head_dim})
        .set_stride({key_.length * row, key_.head_dim, row, 1})
        .set_data_type(fe::DataType_t::BFLOAT16);
    if (!key_.ragged) return;
    t.set_ragged_offset(graph_->tensor(fe::graph::Tensor_attributes()
                                           .set_name(fmt::format("offsets{}", index))
                                           .set_uid(kOffsets + index)
                                           .set_dim({key_.batch + 1, 1, 1, 1})
                                           .set_stride({1, 1, 1, 1})
                                           .set_data_type(fe::DataType_t::INT64)));
  }
  TensorRef Input(CudnnOperand operand, std::int64_t heads) const {
    fe::graph::Tensor_attributes t;
    t.set_name(fmt::format("operand{}", static_cast<int>(operand)));
    Describe(operand, heads, t);
    return graph_->tensor(t);
  }
  void Output(CudnnOperand operand, std::int64_t heads, const TensorRef& t) const {
    t->set_output(true);
    Describe(operand, heads, *t);
  }

  const CudnnPlanKey& key_;
  std::shared_ptr<fe::graph::Graph> graph_;
  TensorRef lengths_;
};

class FrontendPlan final : public CudnnPlan {
 public:
  FrontendPlan(const CudnnPlanKey& key, cudnnHandle_t handle, std::mutex& mutex)
      : key_(key), handle_(handle), mutex_(mutex), graph_(GraphBuilder(key).Build()) {
    fe::error_t status = graph_->build(handle, {fe::HeurMode_t::A});
    if (status.is_good()) status = graph_->get_workspace_size(workspace_bytes_);
    if (status.is_bad()) {
      CISTRON_THROW(kUnsupported,
                    "attention: cuDNN {} has no {} of bf16 for {} sequences of {} tokens, {}/{} "
                    "heads of {}: {}",
                    VersionName(fe::detail::get_backend_version()),
                    key.backward ? "backward" : "forward", key.batch, key.length, key.heads,
                    key.kv_heads, key.head_dim, status.get_message());
    }
  }

  std::int64_t workspace_bytes() const override { return workspace_bytes_; }

  void Run(void* stream, const CudnnArguments& arguments, void* workspace) override {
    std::unordered_map<std::int64_t, void*> pointers = {{kStats, arguments.stats}};
    for (int i = 0; i < kCudnnOperands; ++i) {
      if (!Has(key_, static_cast<CudnnOperand>(i))) continue;
      const auto at = static_cast<std::size_t>(i);
      pointers[kMatrices + i] = arguments.matrices[at];
      if (key_.ragged) pointers[kOffsets + i] = arguments.offsets[at];
    }
    if (key_.ragged) pointers[kLengths] = arguments.lengths;
    std::lock_guard lock(mutex_);  // a handle belongs to one thread at a time
    const cudnnStatus_t bound = fe::detail::set_stream(handle_, static_cast<cudaStream_t>(stream));
    if (bound != CUDNN_STATUS_SUCCESS) {
      CISTRON_THROW(kInternal, "attention: cuDNN does not take the stream: {}",
                    fe::detail::get_error_string(bound));
    }
    fe::error_t status = graph_->execute(handle_, pointers, workspace);
    if (status.is_bad()) {
      CISTRON_THROW(kInternal, "attention: cuDNN failed: {}", status.get_message());
    }
  }

 private:
  CudnnPlanKey key_;
  cudnnHandle_t handle_;
  std::mutex& mutex_;
  std::shared_ptr<fe::graph::Graph> graph_;
  std::int64_t workspace_bytes_ = 0;
};

// The plans of a device and its handle. They live until the process ends, as streams do: nothing of
// cuDNN may be called once the driver is gone.
struct DeviceState {
  std::mutex run;
  cudnnHandle_t handle = nullptr;
  struct Entry {
    std::unique_ptr<CudnnPlan> plan;
    std::string refusal;  // why there is no plan
  };
  std::map<CudnnPlanKey, Entry> plans;
};

std::atomic<std::int64_t> plans_made{0};

std::string Load() {
  // Frontend asks a runtime library of its own, and would take one of CUDA 12 first, for which
  // these headers are not.
  setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "libcudart.so.13", /*overwrite=*/0);
  fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  if (fe::cudnn_dlhandle == nullptr) {
    const char* why = dlerror();
    return fmt::format(
        "cuDNN 9 is not here ({}); it comes with the Python wheel nvidia-cudnn-cu13, whose folder "
        "lib belongs into LD_LIBRARY_PATH",
        why == nullptr ? "libcudnn.so.9 does not load" : why);
  }
  try {
    const std::size_t version = fe::detail::get_backend_version();
    if (version < kOldestCudnn) {
      return fmt::format("cuDNN is {}, needed is {} or newer", VersionName(version),
                         VersionName(kOldestCudnn));
    }
    fe::detail::get_cuda_runtime_version();
  } catch (const std::exception& e) {
    return fmt::format("cuDNN cannot be used: {}", e.what());
  }
  return {};
}

}  // namespace

const std::string& CudnnMissing() {
  static const std::string why = Load();
  return why;
}

std::string CudnnVersion() {
  return CudnnMissing().empty() ? VersionName(fe::detail::get_backend_version()) : std::string();
}

std::int64_t CudnnPlansMade() {
  return plans_made;
}

CudnnPlan& FindCudnnPlan(const CudnnPlanKey& key) {
  if (cudnn_has_no_plan) CISTRON_THROW(kUnsupported, "attention: cuDNN is not asked, for a test");
  if (!CudnnMissing().empty()) CISTRON_THROW(kUnsupported, "attention: {}", CudnnMissing());
  static std::mutex mutex;
  static auto& devices = *new std::map<int, DeviceState>();
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    CISTRON_THROW(kUnsupported, "attention: no GPU is in use");
  }
  std::lock_guard lock(mutex);
  DeviceState& state = devices[device];
  if (state.handle == nullptr) {
    const cudnnStatus_t status = fe::detail::create_handle(&state.handle);
    if (status != CUDNN_STATUS_SUCCESS) {
      state.handle = nullptr;
      CISTRON_THROW(kUnsupported, "attention: cuDNN does not start: {}",
                    fe::detail::get_error_string(status));
    }
  }
  DeviceState::Entry& entry = state.plans[key];
  if (!entry.plan && entry.refusal.empty()) {
    ++plans_made;
    try {
      entry.plan = std::make_unique<FrontendPlan>(key, state.handle, state.run);
    } catch (const Error& e) {
      entry.refusal = e.message();
    }
  }
  if (!entry.plan) CISTRON_THROW(kUnsupported, "{}", entry.refusal);
  return *entry.plan;
}

}  // namespace cistron::ops::internal
