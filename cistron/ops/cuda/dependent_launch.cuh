// Programmatic dependent launch: a kernel that starts while the one before it in the stream ends,
// so that its launch takes no time of its own. CUDA C++ Programming Guide, "Programmatic Dependent
// Launch and Synchronization"; compute capability 9.0 and above, elsewhere kernels follow as usual.
#pragma once

#include "cistron/ops/cuda/launch.cuh"

namespace cistron::ops::internal {

// In the first kernel: blocks of the next may start once all of this one have come here, and there
// is room for them.
__device__ inline void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the next kernel: until here nothing of the kernel before may be read, and nothing be written
// that it uses; from here on it has ended and all its results are seen.
__device__ inline void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that calls WaitForKernelBefore in every thread.
template <class... Parameters, class... Arguments>
void LaunchDependent(const char* op, void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                     cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cuda::Check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), op);
}

}  // namespace cistron::ops::internal
