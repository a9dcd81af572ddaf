// Ranges with names for Nsight's tools (NVTX). Without a tool that listens a range costs the test
// of a flag; a build without CUDA has none.
#pragma once

#include <cstdint>
#include <string_view>

namespace cistron {

// Whether a tool listens: it says so by an environment variable before the process starts.
bool TraceIsOn();

// A range of the calling thread for the length of a scope; ranges nest.
class TraceRange {
 public:
  explicit TraceRange(const char* name) : on_(TraceIsOn()) {
    if (on_) Push(name, -1);
  }
  // "layers.3.attention" for ("layers.", 3, ".attention").
  TraceRange(const char* before, std::int64_t number, const char* after = "") : on_(TraceIsOn()) {
    if (on_) Push(before, number, after);
  }
  ~TraceRange() {
    if (on_) Pop();
  }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  static void Push(const char* before, std::int64_t number, const char* after = "");
  static void Pop();
  bool on_;
};

// A range that may end in another order than it began: an op's, from its beginning to that of the
// next.
std::uint64_t StartTrace(std::string_view name, std::string_view detail);
void EndTrace(std::uint64_t range);

}  // namespace cistron
