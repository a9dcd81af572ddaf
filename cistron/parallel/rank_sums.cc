#include "cistron/parallel/rank_sums.h"

#include <cstring>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::parallel {
namespace {

// Sums tensors of one dtype in one exchange.
void SumTogether(comm::Communicator& ranks, std::span<const Tensor> tensors, DType dtype) {
  std::vector<Tensor> chosen;
  std::int64_t numel = 0;
  for (const Tensor& t : tensors) {
    if (t.dtype() != dtype) continue;
    CISTRON_CHECK(t.IsContiguous() && OnHost(t),
                  "sum over ranks: tensors must be contiguous in host memory, not {}", Describe(t));
    chosen.push_back(t);
    numel += t.numel();
  }
  if (numel == 0) return;
  if (chosen.size() == 1) return ranks.AllReduce(chosen.front(), comm::ReduceOp::kSum);
  const Tensor packed = Tensor::Empty({numel}, dtype);
  std::int64_t at = 0;
  for (const Tensor& t : chosen) {
    std::memcpy(packed.Slice(0, at, t.numel()).raw(), t.raw(), static_cast<std::size_t>(t.bytes()));
    at += t.numel();
  }
  ranks.AllReduce(packed, comm::ReduceOp::kSum);
  at = 0;
  for (const Tensor& t : chosen) {
    std::memcpy(t.raw(), packed.Slice(0, at, t.numel()).raw(), static_cast<std::size_t>(t.bytes()));
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
