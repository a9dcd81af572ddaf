// The implementation of jitter on a GPU, and what it shares with those of jitter.cc; private to
// this folder.
#pragma once

#include "cistron/base/philox.h"
#include "cistron/ops/jitter/jitter.h"

namespace cistron::ops {

extern const JitterImpl kJitterCuda;

namespace internal {

inline constexpr std::int64_t kJitterWords = 4;  // of a Philox block

constexpr RandomStream JitterStream(const JitterConfig& config, std::int64_t step) {
  constexpr std::uint64_t kName = HashName("router_jitter");
  return RandomStream::OfHash(config.seed, kName, static_cast<std::uint64_t>(step),
                              static_cast<std::uint64_t>(config.layer));
}

// 24 random bits become 2·u − 1, exactly.
template <class C>
constexpr C SignedJitter(std::uint32_t bits) {
  return static_cast<C>(bits >> 8) * C(0x1p-23) - C(1);
}

}  // namespace internal
}  // namespace cistron::ops
