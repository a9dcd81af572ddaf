// Instructions of sm_90a that CUDA C++ has no names for: barriers in shared memory, the tensor copy
// engine (TMA), clusters and register budgets. hopper_wgmma.cuh has the matrix product.
//
// One function an instruction, named after it; the PTX ISA has the rules. Shared-memory addresses
// are those of shared_memory.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cistron/ops/cuda/shared_memory.cuh"

namespace cistron::hopper {

using shared_memory::CopyAsync16;
using shared_memory::CopyAsync4;
using shared_memory::SharedAddress;
using shared_memory::WaitCopies;

// ---- clusters ----

__device__ __forceinline__ std::uint32_t ClusterRank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// All threads of the cluster; orders shared memory of all its blocks.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}
// Address of the same variable in another block of the cluster.
__device__ __forceinline__ std::uint32_t MapToRank(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// ---- mbarrier ----

__device__ __forceinline__ void BarrierInit(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// One arrival that also announces `bytes` to be written by the copy engine.
__device__ __forceinline__ void BarrierArriveExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at a barrier of this block and releases this thread's accesses to it.
__device__ __forceinline__ void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives at a barrier of any block of the cluster (an address from MapToRank). Releases this
// thread's accesses to its own block only: `.release.cluster` compiles to a device-wide MEMBAR, for
// each stage, and products that wgmma has finished reading need none.
__device__ __forceinline__ void BarrierArriveCluster(std::uint32_t mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(mapped_barrier) : "memory");
}
// As BarrierArriveCluster, and releases this thread's writes to the other block too.
__device__ __forceinline__ void BarrierArriveReleaseCluster(std::uint32_t mapped_barrier) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(mapped_barrier)
      : "memory");
}
// Sleeps until the phase of the given parity has completed.
__device__ __forceinline__ void BarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// As BarrierWait, and acquires what other blocks of the cluster have released.
__device__ __forceinline__ void BarrierWaitCluster(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- barriers among some warps of a block ----

__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// ---- the tensor copy engine ----

// Orders this thread's ordinary accesses of shared memory before later ones of the copy engine and
// of wgmma.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// A box at element (x, y, z) to shared memory; reads zeros outside the tensor. Completes on
// `barrier` with the bytes of the whole box.
__device__ __forceinline__ void TmaLoad(std::uint32_t shared, const CUtensorMap* map,
                                        std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// As TmaLoad, into the blocks of `mask`, at the same addresses and on the same barriers in each.
__device__ __forceinline__ void TmaLoadMulticast(std::uint32_t shared, const CUtensorMap* map,
                                                 std::uint32_t barrier, int x, int y, int z,
                                                 std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(mask)
      : "memory");
}
// A box from shared memory, added to what is there in the tensor's type; leaves out what lies
// outside the tensor.
__device__ __forceinline__ void TmaReduceAdd(std::uint32_t shared, const CUtensorMap* map, int x,
                                             int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
      " [%1, {%2, %3, %4}], [%0];\n" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Closes a group of this thread's stores.
__device__ __forceinline__ void TmaCommit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Waits until at most kPending of this thread's groups have shared memory left to read.
template <int kPending>
__device__ __forceinline__ void TmaWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// Waits until this thread's stores are done.
__device__ __forceinline__ void TmaWaitAll() {
  asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

// ---- ordinary shared memory ----

// One word of any block of the cluster (an address from MapToRank).
__device__ __forceinline__ void StoreCluster(std::uint32_t mapped_address, int v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;\n" ::"r"(mapped_address), "r"(v) : "memory");
}
__device__ __forceinline__ int LoadSharedInt(std::uint32_t address) {
  int v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Four 8 × 8 tiles of 16-bit elements from the registers of a warp; lane l gives the address of row
// l % 8 of tile l / 8.
__device__ __forceinline__ void StoreMatrix(std::uint32_t row_address, std::uint32_t r0,
                                            std::uint32_t r1, std::uint32_t r2, std::uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}
// The other way, from the same addresses.
__device__ __forceinline__ void LoadMatrix(std::uint32_t row_address, std::uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void StoreShared(std::uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void StoreShared(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 LoadShared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- registers ----

// Gives back, or takes, registers of the warpgroup's pool.
template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void SetMaxRegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace cistron::hopper
