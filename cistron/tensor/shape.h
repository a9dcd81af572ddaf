// Dimensions of a tensor, outermost first.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace cistron {

class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return dims_[static_cast<std::size_t>(i)]; }
  const std::int64_t* begin() const { return dims_.data(); }
  const std::int64_t* end() const { return dims_.data() + rank_; }

  // Product of the dimensions; 1 for a scalar. The constructor refuses negative dimensions and
  // products above 2^63 - 1.
  std::int64_t numel() const;

  friend bool operator==(const Shape& a, const Shape& b);

 private:
  void Validate() const;

  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// "[8, 128]"
std::string ToString(const Shape& shape);

}  // namespace cistron
