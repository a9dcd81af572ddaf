#include "cistron/data/permutation.h"

#include <bit>

#include "cistron/base/error.h"
#include "cistron/base/philox.h"

namespace cistron::data {
namespace {
// Luby and Rackoff need four; small domains mix better with more.
constexpr std::uint32_t kRounds = 8;
}  // namespace

KeyedPermutation::KeyedPermutation(std::uint64_t key, std::int64_t n) : key_(key), n_(n) {
  CISTRON_CHECK(n >= 1 && n <= std::int64_t{1} << 62,
                "KeyedPermutation: size {} is not in [1, 2^62]", n);
  const int bits = std::bit_width(static_cast<std::uint64_t>(n - 1));
  half_bits_ = (bits + 1) / 2;
}

std::int64_t KeyedPermutation::operator()(std::int64_t i) const {
  CISTRON_CHECK(i >= 0 && i < n_, "KeyedPermutation: {} is not in [0, {})", i, n_);
  if (n_ == 1) return 0;
  const std::uint32_t mask = static_cast<std::uint32_t>((std::uint64_t{1} << half_bits_) - 1);
  auto x = static_cast<std::uint64_t>(i);
  do {
    auto left = static_cast<std::uint32_t>(x >> half_bits_);
    auto right = static_cast<std::uint32_t>(x) & mask;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      const std::uint32_t f = Philox4x32({right, round, 0, 0}, key_)[0];
      const std::uint32_t next = left ^ (f & mask);
      left = right;
      right = next;
    }
    x = std::uint64_t{left} << half_bits_ | right;
  } while (x >= static_cast<std::uint64_t>(n_));
  return static_cast<std::int64_t>(x);
}

}  // namespace cistron::data
