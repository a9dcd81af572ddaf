// A build without CUDA or without cudnn-frontend.
#include "cistron/base/error.h"
#include "cistron/ops/attention/attention_cudnn_plan.h"

namespace cistron::ops::internal {

const std::string& CudnnMissing() {
  static const std::string why =
      "this build has no cuDNN: run scripts/setup_cuda.sh, which takes the headers of "
      "cudnn-frontend, then configure and build again";
  return why;
}

std::string CudnnVersion() {
  return {};
}

CudnnPlan& FindCudnnPlan(const CudnnPlanKey&) {
  CISTRON_THROW(kUnsupported, "attention: {}", CudnnMissing());
}

std::int64_t CudnnPlansMade() {
  return 0;
}

}  // namespace cistron::ops::internal
