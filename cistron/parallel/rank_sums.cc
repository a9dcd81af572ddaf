#include "cistron/parallel/rank_sums.h"

#include <vector>

#include "cistron/base/error.h"
#include "cistron/tensor/cuda_backend.h"

namespace cistron::parallel {
namespace {

// Sums tensors of one dtype in one exchange.
void SumTogether(comm::Communicator& ranks, std::span<const Tensor> tensors, DType dtype) {
  std::vector<Tensor> chosen;
  std::int64_t numel = 0;
  for (const Tensor& t : tensors) {
    if (t.dtype() != dtype) continue;
    CISTRON_CHECK(t.IsContiguous(), "sum over ranks: {} is not contiguous", Describe(t));
    CISTRON_CHECK(chosen.empty() || t.device() == chosen.front().device(),
                  "sum over ranks: {} is on {}, those before it on {}", Describe(t),
                  ToString(t.device()), ToString(chosen.front().device()));
    chosen.push_back(t);
    numel += t.numel();
  }
  if (numel == 0) return;
  if (chosen.size() == 1) return ranks.AllReduce(chosen.front(), comm::ReduceOp::kSum);
  const Device device = chosen.front().device();
  const Tensor packed = Tensor::Empty(
      {numel}, dtype,
      device.type == DeviceType::kCpu ? CpuAllocator() : cuda::DeviceAllocator(device.index));
  std::int64_t at = 0;
  for (const Tensor& t : chosen) {
    CopyTo(t.Reshape({t.numel()}), packed.Slice(0, at, t.numel()));
    at += t.numel();
  }
  ranks.AllReduce(packed, comm::ReduceOp::kSum);
  at = 0;
  for (const Tensor& t : chosen) {
    CopyTo(packed.Slice(0, at, t.numel()), t.Reshape({t.numel()}));
    at += t.numel();
  }
}

}  // namespace

void MeshStatisticsReducer::Sum(std::span<const Tensor> tensors) {
  if (mesh_.size() == 1) return;
  for (const DType dtype : {DType::kI64, DType::kF64}) {
    SumTogether(mesh_.world(), tensors, dtype);
  }
}

void MeshAmaxReducer::Max(const Tensor& amax, quant::TensorSharing sharing) {
  comm::Communicator& ranks =
      sharing == quant::TensorSharing::kAll ? mesh_.world() : mesh_.replica_group();
  if (ranks.size() > 1) ranks.AllReduce(amax, comm::ReduceOp::kMax);
}

}  // namespace cistron::parallel
