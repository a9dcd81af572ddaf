// Addresses in shared memory, and copies into it that do not wait (compute capability 8.0 and
// later).
//
// One function an instruction; the PTX ISA has the rules ("cp.async"). Addresses are 32-bit offsets
// in the shared window.
#pragma once

#include <cstdint>

namespace cistron::shared_memory {

__device__ __forceinline__ std::uint32_t SharedAddress(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, or zeros where `there` is false: nothing is read then.
__device__ __forceinline__ void CopyAsync16(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsync4(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}
// Waits until all of this thread's copies are in shared memory; a barrier shows them to others.
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

}  // namespace cistron::shared_memory
