// What is in memory at once, by name: blocks are taken and given back in the order of a program,
// and the largest moment is kept. Nothing is allocated.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cistron::train {

enum class MemoryKind {
  kWeights,      // in the model's dtype, and their quantised copies
  kMasters,      // fp32 weights of a bf16 model
  kMoments,      // of AdamW
  kGradients,    // of weights
  kActivations,  // kept from forward to backward
  kWorkspaces,   // everything that lives within a pass
  kLogits,
  kDispatch,       // token rows on their way between ranks
  kCommunication,  // what collectives need, and parameters gathered from other ranks
};
inline constexpr int kMemoryKinds = 9;
std::string_view Name(MemoryKind kind);

struct MemoryTerm {
  std::string name;
  MemoryKind kind = MemoryKind::kWorkspaces;
  std::int64_t bytes = 0;
};

class MemoryLedger {
 public:
  // Rounds the size of a block as the allocator does.
  using Rounding = std::int64_t (*)(std::int64_t bytes);
  explicit MemoryLedger(Rounding rounding) : rounding_(rounding) {}
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  // Shared as the storage of tensors is; it counts until the last copy is gone.
  using Block = std::shared_ptr<void>;
  Block Take(MemoryKind kind, const std::string& name, std::int64_t bytes) {
    const std::int64_t size = bytes > 0 ? rounding_(bytes) : 0;
    const std::size_t term = Find(kind, name);
    terms_[term].bytes += size;
    live_ += size;
    const auto k = static_cast<std::size_t>(kind);
    of_kind_[k] += size;
    most_of_kind_[k] = std::max(most_of_kind_[k], of_kind_[k]);
    if (live_ > peak_) {
      peak_ = live_;
      at_peak_ = terms_;
      where_ = place_;
    }
    return {nullptr, [this, term, size, k](void*) {
              terms_[term].bytes -= size;
              of_kind_[k] -= size;
              live_ -= size;
            }};
  }
  // Where the program is, for where().
  void At(std::string place) { place_ = std::move(place); }

  std::int64_t live() const { return live_; }
  std::int64_t peak() const { return peak_; }
  const std::vector<MemoryTerm>& at_peak() const { return at_peak_; }
  // Of a kind, at its own largest moment.
  std::int64_t most_of(MemoryKind kind) const {
    return most_of_kind_[static_cast<std::size_t>(kind)];
  }
  const std::string& where() const { return where_; }

 private:
  std::size_t Find(MemoryKind kind, const std::string& name) {
    for (std::size_t i = 0; i < terms_.size(); ++i) {
      if (terms_[i].kind == kind && terms_[i].name == name) return i;
    }
    terms_.push_back({name, kind, 0});
    return terms_.size() - 1;
  }

  Rounding rounding_;
  std::vector<MemoryTerm> terms_, at_peak_;
  std::int64_t live_ = 0, peak_ = 0;
  std::array<std::int64_t, kMemoryKinds> of_kind_{}, most_of_kind_{};
  std::string place_, where_;
};

}  // namespace cistron::train
