// The activations of expert MLPs on a GPU, SwiGLU of activation.h among them: a warp, or a block,
// takes a row; rows beyond the counts, which are read here, return at once.
#include <numbers>

#include "cistron/ops/activation/activation_impls.h"
#include "cistron/ops/activation/gated.cuh"
#include "cistron/ops/activation/scaled_activation_impls.h"
#include "cistron/ops/cuda/rows.cuh"
#include "cistron/ops/cuda/supports.h"

namespace cistron::ops::internal {
namespace {

// As the reference computes them.
template <ActivationKind kKind, class T, class C = Compute<T>>
__device__ inline GatedValues<C> Evaluate(C limit, C alpha, C a, C b) {
  if constexpr (kKind == ActivationKind::kSwiGlu) {
    return Gated<T>(a, a, a, b);
  } else if constexpr (kKind == ActivationKind::kClampedSwiGlu) {
    const C x = a > limit ? limit : a;  // keeps NaN
    const C up = b > limit ? limit : b < -limit ? -limit : b;
    // Beyond −kSaturated σ is 0, and alpha·x may overflow.
    const C product = alpha * x;
    const C z = product < C(-kSaturated) ? C(-kSaturated) : product;
    GatedValues<C> v = Gated<T>(x, z, z, up + C(1));
    if (a > limit) v.gate_slope = 0;
    if (b > limit || b < -limit) v.up_slope = 0;
    return v;
  } else if constexpr (kKind == ActivationKind::kGeGlu) {
    constexpr C kScale = static_cast<C>(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
    constexpr C kCubic = static_cast<C>(0.044715);
    const C c = a > C(kGeluSaturated)    ? C(kGeluSaturated)
                : a < C(-kGeluSaturated) ? C(-kGeluSaturated)
                                         : a;
    const C square = c * c;
    return Gated<T>(a, kScale * c * (C(1) + kCubic * square),
                    kScale * c * (C(1) + C(3) * kCubic * square), b);
  } else {
    const C r = a < 0 ? C(0) : a;  // keeps NaN
    return {r * r, C(2) * r, C(1), C(0)};
  }
}

// Pointers are to row 0; strides in elements. Null where a tensor is not given.
template <class T>
struct Args {
  const std::int64_t* split_sizes;
  std::int64_t groups, rows, width;
  std::int64_t interleave, up_distance;
  Compute<T> limit, alpha;
  const Compute<T>* row_scale;
  const T *x, *dy;
  std::int64_t x_stride, dy_stride;
  T *y, *dx;
  std::int64_t y_stride, dx_stride;
  Compute<T>* dscale;
  bool accumulate_y, accumulate_dx, accumulate_dscale;

  // Column of the gate of element j; its up lies `up_distance` further on.
  __device__ std::int64_t Gate(std::int64_t j) const {
    return interleave > 0 ? j + j / interleave * interleave : j;
  }
};

template <ActivationKind kKind, class T, int N>
__global__ void __launch_bounds__(kThreads) Forward(Args<T> a) {
  using C = Compute<T>;
  const std::int64_t row = RowOfThread();
  if (row >= RowsUsed(a.split_sizes, a.groups, a.rows)) return;
  const T* x = a.x + row * a.x_stride;
  T* y = a.y + row * a.y_stride;
  const C scale = a.row_scale == nullptr ? C(1) : a.row_scale[row];
  for (std::int64_t j = threadIdx.x * N; j < a.width; j += blockDim.x * N) {
    const T* from = x + a.Gate(j);
    const Pack<T, N> gate = LoadPack<N>(from), up = LoadPack<N>(from + a.up_distance);
    C values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto v = Evaluate<kKind, T>(a.limit, a.alpha, Value(gate.at[i]), Value(up.at[i]));
      values[i] = v.gate * v.up * scale;
    }
    StoreValues<N>(values, a.accumulate_y, y + j);
  }
}

template <ActivationKind kKind, class T, int N>
__global__ void __launch_bounds__(kThreads) Backward(Args<T> a) {
  using C = Compute<T>;
  __shared__ C scratch[33];
  const std::int64_t row = RowOfThread();
  if (row >= RowsUsed(a.split_sizes, a.groups, a.rows)) return;
  const T* x = a.x + row * a.x_stride;
  const T* dy = a.dy + row * a.dy_stride;
  T* dx = a.dx + row * a.dx_stride;
  T* y = a.y == nullptr ? nullptr : a.y + row * a.y_stride;
  const C scale = a.row_scale == nullptr ? C(1) : a.row_scale[row];
  C dscale = 0;
  for (std::int64_t j = threadIdx.x * N; j < a.width; j += blockDim.x * N) {
    const std::int64_t gate_column = a.Gate(j), up_column = gate_column + a.up_distance;
    const Pack<T, N> gate = LoadPack<N>(x + gate_column), up = LoadPack<N>(x + up_column);
    const Pack<T, N> d_pack = LoadPack<N>(dy + j);
    C dgate[N], dup[N], out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto v = Evaluate<kKind, T>(a.limit, a.alpha, Value(gate.at[i]), Value(up.at[i]));
      const C d = Value(d_pack.at[i]);
      dscale += d * v.gate * v.up;
      dgate[i] = d * scale * v.up * v.gate_slope;
      dup[i] = d * scale * v.gate * v.up_slope;
      out[i] = v.gate * v.up * scale;
    }
    StoreValues<N>(dgate, a.accumulate_dx, dx + gate_column);
    if constexpr (IsGated(kKind)) StoreValues<N>(dup, a.accumulate_dx, dx + up_column);
    if (y != nullptr) StoreValues<N>(out, a.accumulate_y, y + j);
  }
  if (a.dscale == nullptr) return;
  dscale = RowSum(dscale, scratch);
  if (threadIdx.x == 0) StoreElement(a.dscale[row], dscale, a.accumulate_dscale);
}

template <class F>
void DispatchKind(ActivationKind kind, F&& f) {
  using enum ActivationKind;
  switch (kind) {
    case kSwiGlu: return f(std::integral_constant<ActivationKind, kSwiGlu>{});
    case kClampedSwiGlu: return f(std::integral_constant<ActivationKind, kClampedSwiGlu>{});
    case kGeGlu: return f(std::integral_constant<ActivationKind, kGeGlu>{});
    case kSRelu: return f(std::integral_constant<ActivationKind, kSRelu>{});
  }
}

// Launches forward where dy is not given, else backward.
void Run(const Context& ctx, const ActivationConfig& config, const Tensor& dy, const Tensor& x,
         const Tensor& row_scale, const Tensor& split_sizes, const Output& y, const Output& dx,
         const Output& dscale) {
  const std::int64_t rows = x.dim(0), interleave = config.glu_interleave_size;
  const std::int64_t width = IsGated(config.kind) ? x.dim(1) / 2 : x.dim(1);
  if (rows == 0) return;
  DispatchFloat("activation", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const Args<T> args{.split_sizes = DataOrNull<std::int64_t>(split_sizes),
                       .groups = split_sizes ? split_sizes.numel() : 0,
                       .rows = rows,
                       .width = width,
                       .interleave = interleave,
                       .up_distance = !IsGated(config.kind) ? 0
                                      : interleave > 0      ? interleave
                                                            : width,
                       .limit = static_cast<C>(config.limit),
                       .alpha = static_cast<C>(config.alpha),
                       .row_scale = DataOrNull<C>(row_scale),
                       .x = x.data<T>(),
                       .dy = DataOrNull<T>(dy),
                       .x_stride = x.stride(0),
                       .dy_stride = dy ? dy.stride(0) : 0,
                       .y = DataOrNull<T>(y.tensor),
                       .dx = DataOrNull<T>(dx.tensor),
                       .y_stride = y ? y.tensor.stride(0) : 0,
                       .dx_stride = dx ? dx.tensor.stride(0) : 0,
                       .dscale = DataOrNull<C>(dscale.tensor),
                       .accumulate_y = Accumulates(y),
                       .accumulate_dx = Accumulates(dx),
                       .accumulate_dscale = Accumulates(dscale)};
    const bool packs = width % kPack<T> == 0 && interleave % kPack<T> == 0 && TakesPacks(x) &&
                       TakesPacks(dy) && TakesPacks(y.tensor) && TakesPacks(dx.tensor);
    DispatchPack<T>(packs, [&](auto pack) {
      constexpr int kN = decltype(pack)::value;
      const RowGrid grid(rows, (width + kN - 1) / kN);
      DispatchKind(config.kind, [&](auto kind) {
        constexpr ActivationKind kKind = decltype(kind)::value;
        if (dy) {
          Backward<kKind, T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(args);
        } else {
          Forward<kKind, T, kN><<<grid.blocks, grid.block, 0, StreamOf(ctx)>>>(args);
        }
      });
    });
  });
  CheckLaunch("activation");
}

void ForwardCuda(const Context& ctx, const ActivationConfig& config, const Tensor& x,
                 const Tensor& row_scale, const Tensor& split_sizes, const Output& y) {
  Run(ctx, config, {}, x, row_scale, split_sizes, y, {}, {});
}

void BackwardCuda(const Context& ctx, const ActivationConfig& config, const Tensor& dy,
                  const Tensor& x, const Tensor& row_scale, const Tensor& split_sizes,
                  const Output& dx, const Output& dscale, const Output& y_out) {
  Run(ctx, config, dy, x, row_scale, split_sizes, y_out, dx, dscale);
}

void SwiGluForwardCuda(const Context& ctx, const Tensor& x, const Tensor& row_scale,
                       const Tensor& split_sizes, const Output& y) {
  Run(ctx, {}, {}, x, row_scale, split_sizes, y, {}, {});
}

void SwiGluBackwardCuda(const Context& ctx, const Tensor& dy, const Tensor& x,
                        const Tensor& row_scale, const Tensor& split_sizes, const Output& dx,
                        const Output& dscale, const Output& y_out) {
  Run(ctx, {}, dy, x, row_scale, split_sizes, y_out, dx, dscale);
}

}  // namespace

extern constinit const ScaledActivationImpl kScaledActivationCuda = {
    "cuda", FloatsOnCuda<ScaledActivationProblem>, {ForwardCuda, BackwardCuda}, DeviceType::kCuda};
extern constinit const SwiGluImpl kSwiGluCuda = {"cuda",
                                                 FloatsOnCuda<SwiGluProblem>,
                                                 {SwiGluForwardCuda, SwiGluBackwardCuda},
                                                 DeviceType::kCuda};

}  // namespace cistron::ops::internal
