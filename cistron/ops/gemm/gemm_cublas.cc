// gemm on a GPU through cuBLASLt. A row-major matrix is the transpose of a column-major one, so
// what the library computes is cᵀ = op(b)ᵀ · op(a)ᵀ.
//
// Sums are in fp32 (fp64 for f64), without TF32. Split sums are allowed only through the workspace,
// where they are added in a fixed order, so that the same call gives the same bits.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "cistron/base/log.h"
#include "cistron/ops/gemm/gemm_impls.h"
#include "cistron/ops/gemm/gemm_supports_cuda.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::ops {
namespace {

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;
constexpr std::size_t kMaxDevices = 64;

void Check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  CISTRON_THROW(kInternal, "gemm: {} failed: {}", what, cublasLtGetStatusString(status));
}

// Descriptors of the library, destroyed with their owner.
template <class T, cublasStatus_t (*kDestroy)(T*)>
struct Destroy {
  void operator()(T* p) const { kDestroy(p); }
};
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t,
                               Destroy<cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutDestroy>>;
using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t,
                                    Destroy<cublasLtMatmulDescOpaque_t, cublasLtMatmulDescDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t,
                    Destroy<cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceDestroy>>;

cudaDataType_t CudaType(DType dtype) {
  if (dtype == DType::kF64) return CUDA_R_64F;
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

Layout MakeLayout(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t step) {
  cublasLtMatrixLayout_t layout = nullptr;
  Check(cublasLtMatrixLayoutCreate(&layout, CudaType(dtype), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(cols), step),
        "cublasLtMatrixLayoutCreate");
  return Layout(layout);
}

Description MakeDescription(DType dtype, bool transpose_a, bool transpose_b) {
  const bool f64 = dtype == DType::kF64;
  cublasLtMatmulDesc_t desc = nullptr;
  Check(cublasLtMatmulDescCreate(&desc, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                 f64 ? CUDA_R_64F : CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  Description description(desc);
  const cublasOperation_t a = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  Check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a)),
        "cublasLtMatmulDescSetAttribute");
  Check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b)),
        "cublasLtMatmulDescSetAttribute");
  return description;
}

template <class T>
void SetPreference(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
                   T value) {
  Check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

// Bytes, a power of two of at most 256, to which the address is aligned. Row steps are known to the
// library.
std::uint32_t AlignmentOf(const Tensor& t) {
  const auto address = reinterpret_cast<std::uintptr_t>(t.raw()) | 256u;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

// What an algorithm is chosen for.
struct Key {
  std::array<std::int64_t, 13> values;
  bool operator<(const Key& other) const { return values < other.values; }
};

// What a device keeps between calls. Work of a device is ordered on one stream, so that all calls
// share the workspace. The state lives until the process ends: the driver may be gone before static
// destructors run.
struct DeviceState {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  Tensor workspace;
  std::map<Key, std::optional<cublasLtMatmulAlgo_t>> algorithms;  // none: the library has none
};

DeviceState& StateOf(Device device) {
  static auto* states = new std::array<DeviceState, kMaxDevices>;
  CISTRON_CHECK(device.index >= 0 && static_cast<std::size_t>(device.index) < kMaxDevices,
                "gemm: device {} is beyond the {} that are handled", device.index, kMaxDevices);
  return (*states)[static_cast<std::size_t>(device.index)];
}

// Nothing, and a warning, where the library has none: versions differ in what they take.
std::optional<cublasLtMatmulAlgo_t> ChooseAlgorithm(
    const DeviceState& state, const GemmProblem& p, const Description& description, const Layout& b,
    const Layout& a, const Layout& c, const std::array<std::uint32_t, 3>& alignments) {
  cublasLtMatmulPreference_t created = nullptr;
  Check(cublasLtMatmulPreferenceCreate(&created), "cublasLtMatmulPreferenceCreate");
  const Preference preference(created);
  SetPreference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                static_cast<std::uint64_t>(kWorkspaceBytes));
  SetPreference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  SetPreference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[1]);
  SetPreference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[0]);
  SetPreference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
  SetPreference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status =
      internal::cublas_knows_nothing
          ? CUBLAS_STATUS_NOT_SUPPORTED
          : cublasLtMatmulAlgoGetHeuristic(state.handle, description.get(), b.get(), a.get(),
                                           c.get(), c.get(), preference.get(), 1, &result, &found);
  if (status == CUBLAS_STATUS_SUCCESS && found == 1) return result.algo;
  LogWarning(
      "gemm: cublas has no algorithm for [{}, {}, {}] of {} to {} at alignments of {}, {} "
      "and {} bytes ({}); the plain kernel runs in its place and is much slower",
      p.m, p.n, p.k, Name(p.in_dtype), Name(p.out_dtype), alignments[0], alignments[1],
      alignments[2], cublasLtGetStatusString(status));
  return {};
}

// A step of one row is never used, and the library wants one that is not below the row's length.
std::int64_t RowStep(const Tensor& t) {
  return t.dim(0) <= 1 ? std::max(t.dim(1), t.stride(0)) : t.stride(0);
}

void RunCublas(const Context& ctx, const GemmProblem& p, const Tensor& a, const Tensor& b,
               const Output& c) {
  if (p.k == 0 || p.m == 0 || p.n == 0) return kGemmCuda.run.run(ctx, p, a, b, c);
  const bool ta = p.trans_a == Transpose::kYes, tb = p.trans_b == Transpose::kYes;
  const Description description = MakeDescription(p.in_dtype, tb, ta);
  const std::int64_t a_step = RowStep(a), b_step = RowStep(b), c_step = RowStep(c.tensor);
  const Layout a_layout = MakeLayout(p.in_dtype, a.dim(1), a.dim(0), a_step);
  const Layout b_layout = MakeLayout(p.in_dtype, b.dim(1), b.dim(0), b_step);
  const Layout c_layout = MakeLayout(p.out_dtype, p.n, p.m, c_step);
  const std::array<std::uint32_t, 3> alignments = {AlignmentOf(a), AlignmentOf(b),
                                                   AlignmentOf(c.tensor)};
  // An algorithm does not depend on beta.
  const Key key{{static_cast<int>(p.in_dtype), static_cast<int>(p.out_dtype), ta, tb, p.m, p.n, p.k,
                 a_step, b_step, c_step, alignments[0], alignments[1], alignments[2]}};

  DeviceState& state = StateOf(ctx.device());
  const std::lock_guard lock(state.mutex);
  if (state.handle == nullptr) {
    Check(cublasLtCreate(&state.handle), "cublasLtCreate");
    state.workspace =
        Tensor::Empty({kWorkspaceBytes}, DType::kU8, cuda::DeviceAllocator(ctx.device().index));
  }
  auto found = state.algorithms.find(key);
  if (found == state.algorithms.end()) {
    found = state.algorithms
                .emplace(key, ChooseAlgorithm(state, p, description, b_layout, a_layout, c_layout,
                                              alignments))
                .first;
  }
  if (!found->second) {
    if (ctx.strict()) {
      CISTRON_THROW(kUnsupported,
                    "gemm: strict: the plain kernel would run [{}, {}, {}] of {} to {}, because "
                    "cublas has no algorithm; set strict=false",
                    p.m, p.n, p.k, Name(p.in_dtype), Name(p.out_dtype));
    }
    return kGemmCuda.run.run(ctx, p, a, b, c);
  }
  const bool accumulate = c.mode == WriteMode::kAccumulate;
  const double one64 = 1, beta64 = accumulate ? 1 : 0;
  const float one32 = 1, beta32 = accumulate ? 1 : 0;
  const bool f64 = p.in_dtype == DType::kF64;
  Check(cublasLtMatmul(state.handle, description.get(),
                       f64 ? static_cast<const void*>(&one64) : &one32, b.raw(), b_layout.get(),
                       a.raw(), a_layout.get(), f64 ? static_cast<const void*>(&beta64) : &beta32,
                       c.tensor.raw(), c_layout.get(), c.tensor.raw(), c_layout.get(),
                       &*found->second, state.workspace.raw(),
                       static_cast<std::size_t>(kWorkspaceBytes),
                       static_cast<cudaStream_t>(ctx.stream().handle)),
        "cublasLtMatmul");
}

}  // namespace

extern constinit const GemmImpl kGemmCublas = {
    "cublas", internal::GemmCudaSupports<GemmProblem>, {RunCublas}, DeviceType::kCuda};

}  // namespace cistron::ops
