// libcublasLt is loaded when the first product runs, so that the program starts without it and says
// what is missing. The functions here stand for those that gemm_cublas.cc calls.
#include <cublasLt.h>
#include <dlfcn.h>

#include <string>

#include "cistron/base/error.h"

namespace cistron::ops::internal {
namespace {

constexpr int kMajor = CUBLAS_VER_MAJOR;

struct Library {
  void* handle = nullptr;
  std::string why;  // it is missing
};

// Where the loader looks, then where the build found it.
const Library& CublasLt() {
  static const Library library = [] {
    Library l;
    const std::string name = fmt::format("libcublasLt.so.{}", kMajor);
    for (const std::string& file : {name, std::string(CISTRON_CUDA_LIBRARIES) + "/" + name}) {
      l.handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (l.handle != nullptr) return l;
      if (l.why.empty()) l.why = dlerror();
    }
    l.why = fmt::format(
        "{} cannot be loaded ({}); needed is cuBLAS of CUDA {}: name its folder in "
        "LD_LIBRARY_PATH, or "
        "choose the plain kernels by CISTRON_IMPL=gemm=cuda, which are much slower",
        name, l.why, kMajor);
    return l;
  }();
  return library;
}

template <class F>
F* Symbol(const char* name) {
  const Library& library = CublasLt();
  if (library.handle == nullptr) CISTRON_THROW(kUnsupported, "gemm: {}", library.why);
  void* const symbol = dlsym(library.handle, name);
  if (symbol == nullptr) {
    CISTRON_THROW(kUnsupported, "gemm: libcublasLt.so.{} has no {}; needed is cuBLAS of CUDA {}",
                  kMajor, name, kMajor);
  }
  return reinterpret_cast<F*>(symbol);
}

}  // namespace

}  // namespace cistron::ops::internal

using cistron::ops::internal::Symbol;

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
  static auto* const f = Symbol<decltype(cublasLtGetStatusString)>("cublasLtGetStatusString");
  return f(status);
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static auto* const f = Symbol<decltype(cublasLtCreate)>("cublasLtCreate");
  return f(handle);
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
  static auto* const f = Symbol<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate");
  return f(layout, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  static auto* const f =
      Symbol<decltype(cublasLtMatrixLayoutDestroy)>("cublasLtMatrixLayoutDestroy");
  return f(layout);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  static auto* const f = Symbol<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate");
  return f(desc, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  static auto* const f = Symbol<decltype(cublasLtMatmulDescDestroy)>("cublasLtMatmulDescDestroy");
  return f(desc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  static auto* const f =
      Symbol<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  return f(desc, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  static auto* const f =
      Symbol<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate");
  return f(preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  static auto* const f =
      Symbol<decltype(cublasLtMatmulPreferenceDestroy)>("cublasLtMatmulPreferenceDestroy");
  return f(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  static auto* const f = Symbol<decltype(cublasLtMatmulPreferenceSetAttribute)>(
      "cublasLtMatmulPreferenceSetAttribute");
  return f(preference, attribute, value, bytes);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  static auto* const f =
      Symbol<decltype(cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic");
  return f(handle, desc, a, b, c, d, preference, wanted, results, found);
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  static auto* const f = Symbol<decltype(cublasLtMatmul)>("cublasLtMatmul");
  return f(handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
           workspace, workspace_bytes, stream);
}

}  // extern "C"
