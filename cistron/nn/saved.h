// What a forward pass leaves for its backward pass.
//
// Modules hold parameters only; everything that belongs to one pass is here, so several forwards
// may be in flight. Each module pushes one record and pops it in backward; a record that is
// missing, of another module, or taken twice is an error.
#pragma once

#include <any>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cistron/base/error.h"

namespace cistron::nn {

class Saved {
 public:
  Saved() = default;
  // Of a pass that is repeated before its backward: nobody will read the records.
  static Saved Dropped() {
    Saved saved;
    saved.dropped_ = true;
    return saved;
  }
  bool is_dropped() const { return dropped_; }

  // `owner` identifies the module instance.
  template <class T>
  T& Push(const void* owner, std::string_view name) {
    records_.push_back({owner, std::string(name), std::any(T{}), &BytesOf<T>});
    return *std::any_cast<T>(&records_.back().value);
  }
  // Takes the newest record, which must be the owner's: backward runs in the reverse order of
  // forward.
  template <class T>
  T Pop(const void* owner, std::string_view name) {
    CISTRON_CHECK(!records_.empty(),
                  "{}: backward was called without a forward pass, or twice for "
                  "one forward pass",
                  name);
    Record& last = records_.back();
    CISTRON_CHECK(last.owner == owner,
                  "{}: the saved state belongs to {}{}; backward must run in the "
                  "reverse order of forward",
                  name, last.name == name ? "another " : "", last.name);
    T* value = std::any_cast<T>(&last.value);
    CISTRON_CHECK(value != nullptr, "{}: the saved state is of another kind", name);
    T taken = std::move(*value);
    records_.pop_back();
    return taken;
  }
  bool empty() const { return records_.empty(); }
  // Of the tensors in all records that count theirs (a member bytes()); a tensor that two records
  // share counts twice.
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const Record& r : records_) sum += r.bytes(r.value);
    return sum;
  }

 private:
  template <class T>
  static std::int64_t BytesOf(const std::any& value) {
    if constexpr (requires(const T& t) { t.bytes(); }) {
      return std::any_cast<const T&>(value).bytes();
    } else {
      return 0;
    }
  }

  struct Record {
    const void* owner;
    std::string name;
    std::any value;
    std::int64_t (*bytes)(const std::any&);
  };
  std::vector<Record> records_;
  bool dropped_ = false;
};

}  // namespace cistron::nn
