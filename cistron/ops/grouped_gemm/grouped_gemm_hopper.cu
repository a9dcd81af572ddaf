// Launches the sm_90a grouped product: tensor maps, choice of the instantiation, launch attributes.
#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <limits>

#include "cistron/ops/grouped_gemm/grouped_gemm_hopper.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_hopper_kernel.cuh"
#include "cistron/ops/grouped_gemm/grouped_gemm_impls.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_supports_hopper.h"
#include "cistron/ops/grouped_gemm/grouped_gemm_tiles.h"

namespace cistron::ops::internal {
namespace {

constexpr std::int64_t kAlignment = 16;  // of the copy engine: pointers and rows, in bytes

void CheckCuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    CISTRON_THROW(kInternal, "grouped_gemm: {} failed: {}", what, cudaGetErrorString(status));
  }
}

// From the driver at run time, so that nothing links libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
EncodeTiled GetEncodeTiled() {
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

int Multiprocessors() {
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

Matrices OperandA(const HopperGroupedGemm& g) {
  const std::int64_t cols = g.kind == GroupedGemmKind::kForward ? g.k : g.n;
  return {g.a, 1, g.max_rows, cols, g.lda != 0 ? g.lda : cols, DType::kBF16};
}
Matrices OperandB(const HopperGroupedGemm& g) {
  const std::int64_t ld = g.ldb != 0 ? g.ldb : g.k;
  if (g.kind == GroupedGemmKind::kWgrad) return {g.b, 1, g.max_rows, g.k, ld, DType::kBF16};
  return {g.b, g.groups, g.n, g.k, ld, DType::kBF16};
}
Matrices Result(const HopperGroupedGemm& g) {
  const std::int64_t cols = g.kind == GroupedGemmKind::kForward ? g.n : g.k;
  const std::int64_t ld = g.ldc != 0 ? g.ldc : cols;
  if (g.kind == GroupedGemmKind::kWgrad) return {g.c, g.groups, g.n, cols, ld, g.out_dtype};
  return {g.c, 1, g.max_rows, cols, ld, g.out_dtype};
}

std::string WhyNot(const char* name, const Matrices& m) {
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

CUtensorMap Encode(const Matrices& m, std::uint32_t box_cols, std::uint32_t box_rows) {
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
  if constexpr (kTransposed) return Encode(m, sm90::kChunk, sm90::kBlockK / 2);
  return Encode(m, sm90::kBlockK, kExtent / 2);
}

template <class T>
void Launch(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  const Matrices result = Result(g);
  const CUtensorMap map_a = EncodeOperand<T::kTransposeA, sm90::kBlockM>(OperandA(g));
  const CUtensorMap map_b = EncodeOperand<T::kTransposeB, T::kBlockN>(OperandB(g));
  const CUtensorMap map_c = Encode(result, T::kStoreCols, sm90::kWarpM);
  int* const next_tile = tiles.drawn ? static_cast<int*>(g.workspace) : nullptr;
  const sm90::KernelArgs args = {
      .groups = static_cast<int>(g.groups),
      .max_rows = static_cast<int>(g.max_rows),
      .rows = static_cast<int>(g.n),
      .cols = static_cast<int>(result.cols),
      .depth = static_cast<int>(g.kind == GroupedGemmKind::kForward ? g.k : g.n),
      .panel_pairs = tiles.panel_pairs,
      .accumulate = g.accumulate,
      .next_tile = next_tile,
      .split_sizes = g.split_sizes,
      .c = g.c,
      .ldc = result.ld,
      .group_stride = T::kWgrad ? result.rows * result.ld : 0,
  };

  const auto kernel = sm90::sm90_grouped_gemm_kernel<T>;
  constexpr int kSharedBytes = sm90::SharedLayout<T>::kBytes;
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
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(g.stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (next_tile != nullptr) {
    CheckCuda(cudaMemsetAsync(next_tile, 0, sizeof(int), config.stream), "cudaMemsetAsync");
  }
  CheckCuda(cudaLaunchKernelEx(&config, kernel, map_a, map_b, map_c, args), "launch");
}

template <GroupedGemmKind kKind, class Out>
void LaunchTiles(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  switch (tiles.block_n) {
    case 256: return Launch<sm90::Traits<kKind, 256, Out>>(g, tiles);
    case 192: return Launch<sm90::Traits<kKind, 192, Out>>(g, tiles);
    case 128: return Launch<sm90::Traits<kKind, 128, Out>>(g, tiles);
    default: break;
  }
  CISTRON_THROW(kInternal, "grouped_gemm: no kernel has tiles of {} columns", tiles.block_n);
}

template <GroupedGemmKind kKind>
void LaunchKind(const HopperGroupedGemm& g, const HopperTiles& tiles) {
  if (g.out_dtype == DType::kF32) {
    LaunchTiles<kKind, float>(g, tiles);
  } else {
    LaunchTiles<kKind, __nv_bfloat16>(g, tiles);
  }
}

}  // namespace

Support HopperGroupedGemmSupports(const HopperGroupedGemm& gemm) {
  if (gemm.out_dtype != DType::kBF16 && gemm.out_dtype != DType::kF32) {
    return Support::No(fmt::format("results are bf16 or f32, not {}", Name(gemm.out_dtype)));
  }
  if (Support shape = HopperShapeSupports(gemm.kind, gemm.groups, gemm.max_rows, gemm.n, gemm.k);
      !shape) {
    return shape;
  }
  for (const auto& [name, matrices] :
       {std::pair("a", OperandA(gemm)), std::pair("b", OperandB(gemm)),
        std::pair("c", Result(gemm))}) {
    if (std::string why = WhyNot(name, matrices); !why.empty()) return Support::No(std::move(why));
  }
  return Support::Yes();
}

std::int64_t HopperGroupedGemmWorkspace(const HopperGroupedGemm&) {
  return sizeof(int);
}

void LaunchHopperGroupedGemm(const HopperGroupedGemm& gemm) {
  if (const Support support = HopperGroupedGemmSupports(gemm); !support) {
    CISTRON_THROW(kUnsupported, "grouped_gemm: {}", support.reason);
  }
  const bool wgrad = gemm.kind == GroupedGemmKind::kWgrad;
  if (gemm.groups == 0 || gemm.n == 0 || gemm.k == 0) return;
  if (gemm.max_rows == 0) {
    // No operand to describe; weight gradients are zeros.
    if (wgrad && !gemm.accumulate) {
      const Matrices c = Result(gemm);
      const std::size_t element = SizeOf(c.dtype);
      CheckCuda(cudaMemset2DAsync(gemm.c, static_cast<std::size_t>(c.ld) * element, 0,
                                  static_cast<std::size_t>(c.cols) * element,
                                  static_cast<std::size_t>(c.count * c.rows),
                                  static_cast<cudaStream_t>(gemm.stream)),
                "cudaMemset2DAsync");
    }
    return;
  }
  const HopperTiles tiles =
      ChooseHopperTiles(gemm.kind, gemm.groups, gemm.max_rows, gemm.n, gemm.k, Multiprocessors());
  switch (gemm.kind) {
    case GroupedGemmKind::kForward: return LaunchKind<GroupedGemmKind::kForward>(gemm, tiles);
    case GroupedGemmKind::kDgrad: return LaunchKind<GroupedGemmKind::kDgrad>(gemm, tiles);
    case GroupedGemmKind::kWgrad: return LaunchKind<GroupedGemmKind::kWgrad>(gemm, tiles);
  }
}

}  // namespace cistron::ops::internal

namespace cistron::ops {
namespace {

void RunHopper(const Context& ctx, const GroupedGemmProblem& p, const Tensor& split_sizes,
               const Tensor& a, const Tensor& b, const Output& c) {
  internal::HopperGroupedGemm gemm;
  gemm.kind = p.kind;
  gemm.out_dtype = p.out_dtype;
  gemm.accumulate = c.mode == WriteMode::kAccumulate;
  gemm.groups = p.groups;
  gemm.max_rows = p.max_rows;
  gemm.n = p.n;
  gemm.k = p.k;
  gemm.lda = a.stride(-2);
  gemm.ldb = b.stride(-2);
  gemm.ldc = c.tensor.stride(-2);
  gemm.a = a.raw();
  gemm.b = b.raw();
  gemm.c = c.tensor.raw();
  gemm.split_sizes = split_sizes.data<std::int64_t>();
  gemm.stream = ctx.stream().handle;
  const Tensor workspace = ctx.Empty({internal::HopperGroupedGemmWorkspace(gemm)}, DType::kU8);
  gemm.workspace = workspace.raw();
  internal::LaunchHopperGroupedGemm(gemm);
}

}  // namespace

extern constinit const GroupedGemmImpl kGroupedGemmHopper = {
    "hopper", internal::GroupedGemmHopperSupports, {RunHopper}, DeviceType::kCuda};

}  // namespace cistron::ops
