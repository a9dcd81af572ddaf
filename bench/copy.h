// What memory-bound ops are measured against: copies by all threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

#include "cistron/base/threads.h"
#include "cistron/tensor/tensor.h"

namespace cistron::bench {

// A copy of [from, from + bytes) by plain loads and stores of the widest vectors, which go through
// the caches as those of the ops do; memcpy may go past them when much is copied.
void VectorCopy(const char* from, std::int64_t bytes, char* to);

// Both move `bytes` in all: they read half of them and write half, each between buffers of its own,
// so that one does not find in the caches what the other left there.
struct Copies {
  std::function<void()> memcpy, vector;
};
inline Copies CopiesOf(std::int64_t bytes) {
  const auto parallel = [=](auto copy) {
    const Tensor from = Tensor::Zeros({bytes / 8}, DType::kF32), to = from.Clone();
    return [=] {
      ParallelChunks(from.bytes(), 1 << 14, [&](std::int64_t begin, std::int64_t end, int) {
        copy(static_cast<const char*>(from.raw()) + begin, end - begin,
             static_cast<char*>(to.raw()) + begin);
      });
    };
  };
  return {parallel([](const char* a, std::int64_t size, char* b) {
            std::memcpy(b, a, static_cast<std::size_t>(size));
          }),
          parallel(VectorCopy)};
}

}  // namespace cistron::bench
