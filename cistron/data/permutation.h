// A keyed permutation of [0, n) in constant memory: a true shuffle without a buffer.
#pragma once

#include <cstdint>

namespace cistron::data {

// Feistel network over the smallest even number of bits that holds n, rounds by Philox; values that
// fall outside [0, n) walk on along their cycle until they fall inside (Black and Rogaway, "Ciphers
// with arbitrary finite domains", CT-RSA 2002). Every element of [0, n) is the image of exactly
// one.
class KeyedPermutation {
 public:
  // n ≥ 1.
  KeyedPermutation(std::uint64_t key, std::int64_t n);

  std::int64_t size() const { return n_; }
  // Image of i in [0, n). Four walks at most on average.
  std::int64_t operator()(std::int64_t i) const;

 private:
  std::uint64_t key_;
  std::int64_t n_;
  int half_bits_;
};

}  // namespace cistron::data
