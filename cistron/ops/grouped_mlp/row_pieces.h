// How the rows of groups are cut for threads and for the cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cistron::ops::internal {

// Rows [begin, end) of the whole tensor, all of one group.
struct RowPiece {
  std::int64_t group, begin, end;
  std::int64_t rows() const { return end - begin; }
};

// Cuts [begin, end) of a group into pieces of about equal size, at most `most` rows each where that
// leaves at least 64, on steps of 8 rows, and appends them. Which rows share a piece depends on
// nothing but the arguments.
void CutRows(std::int64_t group, std::int64_t begin, std::int64_t end, std::int64_t most,
             std::vector<RowPiece>& pieces);

// Pieces of all groups for `threads` threads that take them in order, largest first, none larger
// than `most` rows. `offsets` [E + 1] are the groups' first rows.
std::vector<RowPiece> PlanRowPieces(std::span<const std::int64_t> offsets, int threads,
                                    std::int64_t most);

// Rows of a wave of whole groups, whose intermediate tensors take `bytes_per_row`: as many as keep
// them within 8 MiB, about a share of the last-level cache. Each wave costs a meeting of all
// threads after every product, so waves are as large as that allows.
std::int64_t WaveRows(std::int64_t bytes_per_row);

// Another limit of bytes while this lives, so that small tests have several waves.
class ScopedWaveBytes {
 public:
  explicit ScopedWaveBytes(std::int64_t bytes);
  ~ScopedWaveBytes();
  ScopedWaveBytes(const ScopedWaveBytes&) = delete;
  ScopedWaveBytes& operator=(const ScopedWaveBytes&) = delete;
};

}  // namespace cistron::ops::internal
