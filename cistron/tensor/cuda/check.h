// Checked calls of the CUDA runtime, for the sources of the backend.
#pragma once

#include <cuda_runtime.h>

#include "cistron/base/error.h"

namespace cistron::cuda {

// An error may belong to work that was queued earlier; the message says so.
inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  CISTRON_THROW(kInternal, "cuda: {} failed: {} ({}); the cause may be earlier work on the device",
                what, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace cistron::cuda
