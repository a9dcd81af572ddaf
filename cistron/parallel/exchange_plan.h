// Where rows of experts go when every rank knows how many rows every rank has for each expert.
//
// counts[s·E + e]: rows that rank s routes to expert e. Rank d has experts [d·L, (d + 1)·L), L =
// E / ranks. On their way out a rank's rows lie by expert (its row map); where they arrive they lie
// by expert, and within an expert by the rank that sent them and then in that rank's order. So each
// (sender, expert) is one run of rows at both ends, and whoever has the counts knows where both
// begin: rows are written to their place, and nobody sorts what it received. Plain functions of
// numbers, for kernels and for tests on a CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CISTRON_ON_BOTH __host__ __device__
#else
#define CISTRON_ON_BOTH
#endif

namespace cistron::parallel {

struct ExchangePlan {
  const std::int64_t* counts = nullptr;
  int ranks = 1, experts = 1;

  CISTRON_ON_BOTH int LocalExperts() const { return experts / ranks; }
  CISTRON_ON_BOTH int Owner(int expert) const { return expert / LocalExperts(); }
  CISTRON_ON_BOTH std::int64_t Count(int source, int expert) const {
    return counts[static_cast<std::int64_t>(source) * experts + expert];
  }

  // Rows that rank `owner` receives from all, itself included.
  CISTRON_ON_BOTH std::int64_t Received(int owner) const {
    std::int64_t sum = 0;
    for (int s = 0; s < ranks; ++s) {
      for (int e = owner * LocalExperts(); e < (owner + 1) * LocalExperts(); ++e) {
        sum += Count(s, e);
      }
    }
    return sum;
  }
  // The most that a rank receives.
  CISTRON_ON_BOTH std::int64_t MostReceived() const {
    std::int64_t most = 0;
    for (int d = 0; d < ranks; ++d) {
      const std::int64_t received = Received(d);
      if (received > most) most = received;
    }
    return most;
  }
  // Rows of all ranks for an expert.
  CISTRON_ON_BOTH std::int64_t OfExpert(int expert) const {
    std::int64_t sum = 0;
    for (int s = 0; s < ranks; ++s) sum += Count(s, expert);
    return sum;
  }

  // Where the rows of `source` for `expert` begin with the rank that has the expert.
  CISTRON_ON_BOTH std::int64_t RowAtOwner(int source, int expert) const {
    std::int64_t row = 0;
    for (int e = Owner(expert) * LocalExperts(); e < expert; ++e) row += OfExpert(e);
    for (int s = 0; s < source; ++s) row += Count(s, expert);
    return row;
  }
  // Where they begin in the row map of `source`.
  CISTRON_ON_BOTH std::int64_t RowAtSource(int source, int expert) const {
    std::int64_t row = 0;
    for (int e = 0; e < expert; ++e) row += Count(source, e);
    return row;
  }
};

// Rows of a receive buffer for a rank that computes `tokens` tokens with `top_k` rows each at once:
// `factor` times the rows of an even share, and no more than there can be.
inline std::int64_t BufferRows(double factor, std::int64_t tokens, std::int64_t top_k,
                               std::int64_t ranks) {
  const std::int64_t even = tokens * top_k, all = even * ranks;
  if (factor >= static_cast<double>(ranks)) return all < 1 ? 1 : all;  // before it overflows
  auto rows = static_cast<std::int64_t>(factor * static_cast<double>(even));
  if (static_cast<double>(rows) < factor * static_cast<double>(even)) ++rows;
  if (rows > all) rows = all;
  return rows < 1 ? 1 : rows;
}

// The factor of buffers after those of an even share of `even` rows were too small for `needed`: an
// eighth more than was needed, since routing that has moved so far moves on. A factor, not a number
// of rows: it is kept in checkpoints, and another layout has other shares.
inline double GrownFactor(std::int64_t needed, std::int64_t even) {
  const std::int64_t more = (needed + 7) / 8;
  return static_cast<double>(needed + more) / static_cast<double>(even < 1 ? 1 : even);
}

}  // namespace cistron::parallel
