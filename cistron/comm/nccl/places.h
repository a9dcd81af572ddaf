// Where ranks with a GPU each run: which GPU is a rank's, and that no two have the same. Needs
// neither NCCL nor a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace cistron::comm::nccl {

// Plain bytes: it travels as it is.
struct Place {
  std::array<char, 256> machine{};  // its name, ending with NUL
  std::array<char, 16> gpu{};       // the UUID, which no other GPU has
  std::int32_t index = 0;
  std::int32_t visible = 0;  // GPUs that the rank sees
};

// The GPU of `rank` among those that it sees: the one numbered as the rank is among those of its
// machine, or the only one. `all`: of all ranks, by rank. Throws kUnsupported, on every rank, where
// a machine has fewer GPUs than ranks.
int DeviceIndex(std::span<const Place> all, int rank);
// Throws kBadInput naming two ranks that have one GPU, which NCCL does not do.
void CheckOneRankAGpu(std::span<const Place> all);

}  // namespace cistron::comm::nccl
