// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011).
//
// A number is a pure function of a key and a counter, never of a rank, a thread or of what was
// drawn before. Streams are named: a weight's is (seed, canonical name) with the flat index in the
// global tensor as its counter; a sample's (seed, epoch, global index); per-token noise (seed,
// step, global sample, position, layer).
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace cistron {

using PhiloxBlock = std::array<std::uint32_t, 4>;

// Ten rounds of Philox4x32: four random words of a 128-bit counter under a 64-bit key.
constexpr PhiloxBlock Philox4x32(PhiloxBlock counter, std::uint64_t key) {
  std::uint32_t k0 = static_cast<std::uint32_t>(key);
  std::uint32_t k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(p1),
        static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// 64-bit finaliser (SplitMix64, Steele et al. 2014) used to build keys from several numbers.
constexpr std::uint64_t Mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// FNV-1a of a name: stable over platforms and versions, so that a name is a stream for ever.
constexpr std::uint64_t HashName(std::string_view name) {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// A named stream of random numbers with random access.
class RandomStream {
 public:
  constexpr RandomStream(std::uint64_t seed, std::string_view name)
      : key_(Mix64(Mix64(seed) ^ HashName(name))) {}
  constexpr RandomStream(std::uint64_t seed, std::string_view name, std::uint64_t a,
                         std::uint64_t b = 0)
      : RandomStream(OfHash(seed, HashName(name), a, b)) {}
  // The same with the name's hash, for device code, where there are no strings.
  static constexpr RandomStream OfHash(std::uint64_t seed, std::uint64_t hash, std::uint64_t a,
                                       std::uint64_t b) {
    return RandomStream(Mix64(Mix64(Mix64(Mix64(seed) ^ hash) ^ a) ^ b));
  }

  // The random bits of indices 4·block … 4·block + 3.
  constexpr PhiloxBlock Block(std::uint64_t block) const {
    return Philox4x32(
        {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), 0, 0}, key_);
  }
  // 32 random bits of an index.
  constexpr std::uint32_t Bits(std::uint64_t index) const { return Block(index >> 2)[index & 3]; }
  // Uniform in [0, 1) with 24 bits.
  constexpr float Uniform(std::uint64_t index) const {
    return static_cast<float>(Bits(index) >> 8) * 0x1p-24f;
  }
  // Uniform integer in [0, n), n ≥ 1, from 64 bits (bias below n·2^-64).
  constexpr std::uint64_t Below(std::uint64_t index, std::uint64_t n) const {
    const PhiloxBlock block = Block(index);
    const std::uint64_t bits = std::uint64_t{block[1]} << 32 | block[0];
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits) * n) >> 64);
  }
  // Standard normal: Box-Muller in fp64 over a pair of 32-bit words, one result an index.
  double Normal(std::uint64_t index) const {
    const PhiloxBlock block = Block(index >> 1);
    const std::size_t pair = (index & 1) * 2;
    const double u1 = (static_cast<double>(block[pair]) + 0.5) * 0x1p-32;
    const double u2 = static_cast<double>(block[pair + 1]) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2);
  }

 private:
  explicit constexpr RandomStream(std::uint64_t key) : key_(key) {}

  std::uint64_t key_;
};

}  // namespace cistron
