// Tests on a GPU, where the build has the backend and the machine a device.
#pragma once

#include "cistron/ops/context.h"

namespace cistron::testing {

// Called by main before any tensor exists: when there is a GPU, tensors of the host lie in
// page-locked memory, which kernels read and write as their own, and launches wait for their
// kernel. CISTRON_TEST_CUDA=0 leaves the GPU alone.
void UseCuda();
bool HasCuda();
// Runs on the GPU; what an op allocates is host memory, so that tests can read it.
ops::Context CudaContext();

}  // namespace cistron::testing
