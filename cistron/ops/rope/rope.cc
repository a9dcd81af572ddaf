// Argument checks, table of angles and choice of the implementation of rope.
#include "cistron/ops/rope/rope.h"

#include <array>
#include <cmath>

#include "cistron/base/threads.h"
#include "cistron/ops/op_work.h"
#include "cistron/ops/rope/rope_impls.h"

namespace cistron::ops {
namespace {

template <class C>
void FillTable(const Tensor& table, double theta) {
  const std::int64_t half = table.dim(1);
  ParallelFor(table.dim(0), 64, [&](std::int64_t p) {
    C* row = table.data<C>() + p * half * 2;
    for (std::int64_t i = 0; i < half; ++i) {
      // The angle is rounded to the compute type, as models trained elsewhere saw it: at large
      // positions an f32 angle is off by more than any rounding of its cosine.
      const C exponent = static_cast<C>(2 * i) / static_cast<C>(2 * half);
      const C frequency = C(1) / std::pow(static_cast<C>(theta), exponent);
      const C angle = static_cast<C>(p) * frequency;
      row[2 * i] = std::cos(angle);
      row[2 * i + 1] = std::sin(angle);
    }
  });
}

void Rotate(const Context& ctx, const Tensor& table, const Tensor& positions, std::int64_t head_dim,
            bool inverse, const Tensor& x) {
  CISTRON_CHECK(head_dim >= 2 && head_dim % 2 == 0, "rope: head_dim {} is not even and positive",
                head_dim);
  CISTRON_CHECK(x && x.rank() == 2 && x.dim(1) % head_dim == 0, "rope: x is {}, not [T, heads·{}]",
                Describe(x), head_dim);
  CISTRON_CHECK(x.numel() == 0 || x.stride(1) == 1,
                "rope: x has stride {} along the last dimension, not 1", x.stride(1));
  CISTRON_CHECK(table && table.rank() == 3 && table.dim(1) == head_dim / 2 && table.dim(2) == 2 &&
                    table.dtype() == ComputeType(x.dtype()) && table.IsContiguous(),
                "rope: table is {}, not {} [positions, {}, 2]", Describe(table),
                Name(ComputeType(x.dtype())), head_dim / 2);
  CISTRON_CHECK(positions && positions.rank() == 1 && positions.dtype() == DType::kI64 &&
                    positions.dim(0) == x.dim(0) && positions.IsContiguous(),
                "rope: positions is {}, not i64 [{}]", Describe(positions), x.dim(0));
  for (std::int64_t t = 0; OnHost(positions) && t < positions.dim(0); ++t) {
    const std::int64_t p = positions.data<std::int64_t>()[t];
    CISTRON_CHECK(p >= 0 && p < table.dim(0), "rope: position {} of token {} is not in [0, {})", p,
                  t, table.dim(0));
  }
  const RopeProblem problem{x.dtype(), x.dim(0), x.dim(1) / head_dim, head_dim};
  AnnounceWork(ctx, 0, x, x);
  Select(ctx, "rope", RopeImpls(), problem).rotate(ctx, table, positions, head_dim, inverse, x);
}

}  // namespace

std::span<const RopeImpl> RopeImpls() {
  static const std::array impls = {CudaRope(), CpuRope(), RefRope()};
  return impls;
}

Tensor RopeTable(std::int64_t positions, std::int64_t head_dim, double theta, DType compute_type) {
  CISTRON_CHECK(head_dim >= 2 && head_dim % 2 == 0, "rope: head_dim {} is not even and positive",
                head_dim);
  CISTRON_CHECK(positions >= 0, "rope: {} positions", positions);
  CISTRON_CHECK(theta > 0, "rope: theta {} is not positive", theta);
  const Tensor table = Tensor::Empty({positions, head_dim / 2, 2}, compute_type);
  if (compute_type == DType::kF64) {
    FillTable<double>(table, theta);
  } else {
    FillTable<float>(table, theta);
  }
  return table;
}

void RopeForward(const Context& ctx, const Tensor& table, const Tensor& positions,
                 std::int64_t head_dim, const Tensor& x) {
  Rotate(ctx, table, positions, head_dim, /*inverse=*/false, x);
}

void RopeBackward(const Context& ctx, const Tensor& table, const Tensor& positions,
                  std::int64_t head_dim, const Tensor& dx) {
  Rotate(ctx, table, positions, head_dim, /*inverse=*/true, dx);
}

}  // namespace cistron::ops
