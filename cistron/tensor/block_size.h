// What a block of CPU memory takes, for those who plan memory without taking it.
#pragma once

#include <cstdint>

namespace cistron {

// Bytes that CPU allocators take for a block of `bytes`: their statistics count these.
std::int64_t CpuBlockBytes(std::int64_t bytes);

}  // namespace cistron
