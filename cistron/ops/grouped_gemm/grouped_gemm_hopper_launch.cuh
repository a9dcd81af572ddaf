// What launching a kernel of grouped_gemm_hopper_kernel.cuh takes: matrices, their tensor maps, the
// attributes of the launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <string>

#include "cistron/base/error.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_kernel.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

namespace cistron::ops::internal::sm90 {

inline constexpr std::int64_t kAlignment = 16;  // of the copy engine: pointers and rows, in bytes

inline void CheckCuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    CISTRON_THROW(kInternal, "grouped_gemm: {} failed: {}", what, cudaGetErrorString(status));
  }
}

// From the driver at run time, so that nothing links libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
inline EncodeTiled GetEncodeTiled() {
  static const EncodeTiled encode = [] {
    constexpr unsigned kSince = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    CheckCuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                               cudaEnableDefault, &result),
              "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) {
      CISTRON_THROW(kUnsupported, "grouped_gemm: the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return encode;
}

inline int Multiprocessors() {
  int device = 0;
  int count = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  CheckCuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
            "cudaDeviceGetAttribute");
  return count;
}

// A stack of row-major matrices.
struct Matrices {
  const void* data;
  std::int64_t count, rows, cols, ld;
  DType dtype;
};

inline std::string WhyNot(const char* name, const Matrices& m) {
  const auto bytes = m.ld * static_cast<std::int64_t>(SizeOf(m.dtype));
  if (m.ld < m.cols)
    return fmt::format("rows of {} are {} apart, shorter than {}", name, m.ld, m.cols);
  if (bytes % kAlignment != 0) {
    return fmt::format("rows of {} are {} bytes apart, not a multiple of 16", name, bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(m.data) % kAlignment != 0) {
    return fmt::format("{} is not aligned to 16 bytes", name);
  }
  return {};
}

inline CUtensorMap Encode(const Matrices& m, std::uint32_t box_cols, std::uint32_t box_rows) {
  const auto element = static_cast<std::int64_t>(SizeOf(m.dtype));
  const std::array<cuuint64_t, 3> size = {static_cast<cuuint64_t>(m.cols),
                                          static_cast<cuuint64_t>(m.rows),
                                          static_cast<cuuint64_t>(m.count)};
  const std::array<cuuint64_t, 2> stride = {static_cast<cuuint64_t>(m.ld * element),
                                            static_cast<cuuint64_t>(m.rows * m.ld * element)};
  const std::array<cuuint32_t, 3> box = {box_cols, box_rows, 1};
  const std::array<cuuint32_t, 3> step = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = GetEncodeTiled()(
      &map,
      m.dtype == DType::kF32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      3, const_cast<void*>(m.data), size.data(), stride.data(), box.data(), step.data(),
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    CISTRON_THROW(kInternal, "grouped_gemm: no tensor map for [{}, {}, {}] with rows {} apart: {}",
                  m.count, m.rows, m.cols, m.ld, static_cast<int>(status));
  }
  return map;
}

// Boxes: half an operand's stage (LoadHalf), or one store buffer.
template <bool kTransposed, int kExtent>
CUtensorMap EncodeOperand(const Matrices& m) {
  if constexpr (kTransposed) return Encode(m, kChunk, kBlockK / 2);
  return Encode(m, kBlockK, kExtent / 2);
}

// The next product's tiles are drawn from `counter` where the tiles say so; null: dealt out.
template <class T>
void LaunchKernel(const HopperTiles& tiles, void* counter, cudaStream_t stream,
                  const CUtensorMap& map_a, const CUtensorMap& map_b, const CUtensorMap& map_c,
                  KernelArgs args) {
  args.panel_pairs = tiles.panel_pairs;
  args.next_tile = tiles.drawn ? static_cast<int*>(counter) : nullptr;
  const auto kernel = sm90_grouped_gemm_kernel<T>;
  constexpr int kSharedBytes = SharedLayout<T>::kBytes;
  static_assert(kSharedBytes <= 227 * 1024);
  // Each time: the attribute belongs to the current device.
  CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
            "cudaFuncSetAttribute");
  // The next kernel's blocks may start as ours leave; they wait for all of ours in the kernel.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles.blocks));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (args.next_tile != nullptr) {
    CheckCuda(cudaMemsetAsync(args.next_tile, 0, sizeof(int), stream), "cudaMemsetAsync");
  }
  CheckCuda(cudaLaunchKernelEx(&config, kernel, map_a, map_b, map_c, args), "launch");
}

}  // namespace cistron::ops::internal::sm90
