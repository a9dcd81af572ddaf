// An allocator for tests: guard words on both sides of every block, contents poisoned.
//
// A new block is filled with 0xFF bytes, which are NaN in every floating type, so a value that an
// op forgot to write shows up as NaN. Guards hold a pattern that is NaN in f64, f32, f16 and bf16,
// so a read beyond a block shows up as NaN as well, and a write beyond it as a violation. A
// returned block is checked, filled with 0xFF and kept from reuse until the allocator dies: a write
// after return is a violation too.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cistron/tensor/allocator.h"

namespace cistron::testing {

class GuardedAllocator final : public Allocator {
 public:
  GuardedAllocator() = default;
  GuardedAllocator(const GuardedAllocator&) = delete;
  GuardedAllocator& operator=(const GuardedAllocator&) = delete;
  // Fails the running test when there are violations that were not taken, or blocks still in use.
  ~GuardedAllocator() override;

  void* Allocate(std::size_t bytes) override;
  void Deallocate(void* pointer, std::size_t bytes) noexcept override;
  Device device() const override { return {}; }
  AllocatorStats Stats() const override;
  void ResetPeak() override;

  // Checks every block and returns all violations found so far, then forgets them. Each says which
  // side of which block was overwritten and at which byte.
  std::vector<std::string> TakeViolations();

 private:
  struct Block {
    std::size_t bytes = 0;
    bool live = true;
  };
  void CheckBlock(const std::byte* payload, const Block& block);

  mutable std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;  // by payload
  std::vector<std::string> violations_;
  AllocatorStats stats_;
};

}  // namespace cistron::testing
