// A file of golden numerics, and the table of what was compared with it: for verify_numerics*.cc.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cistron/check/compare.h"
#include "cistron/io/safetensors.h"
#include "cistron/train/verify.h"

namespace cistron::train {

class NumericsFile {
 public:
  explicit NumericsFile(const std::filesystem::path& path) : file_(path) {
    for (const auto& entry : file_.entries()) unread_.insert(entry.name);
  }

  bool Has(const std::string& name) const { return file_.Find(name) != nullptr; }
  // Throws kNotFound with the nearest name.
  Tensor Get(const std::string& name) {
    unread_.erase(name);
    return file_.Read(name);
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : file_.entries()) names.push_back(entry.name);
    return names;
  }
  // Tensors that nobody has asked for.
  const std::set<std::string>& unread() const { return unread_; }

 private:
  io::SafetensorsFile file_;
  std::set<std::string> unread_;
};

// One row a group of quantities, in the order in which they first appear.
class NumericsTable {
 public:
  // The same shape but for dimensions of 1, and the same type but for 8-bit formats kept as bytes;
  // anything else is a failure.
  void Bitwise(const std::string& group, const Tensor& got, const Tensor& expected);
  // Codes of an 8-bit format, kept as bytes in the file: the sign of a NaN is free.
  void Codes(const std::string& group, const Tensor& got, const Tensor& expected);
  // max|got − expected| ≤ bound · max|expected|.
  void ToMaximum(const std::string& group, const Tensor& got, const Tensor& expected, double bound);
  // With a bound for each element.
  void Bound(const std::string& group, const Tensor& got, const Tensor& expected,
             const std::function<double(std::int64_t)>& bound);
  void Number(const std::string& group, double got, double expected, double relative_bound);
  // Something that could not be compared: always a failure.
  void Fail(const std::string& group, const std::string& why);

  std::vector<VerifyRow> rows() const { return rows_; }
  const std::string& note() const { return note_; }

 private:
  VerifyRow& Row(const std::string& group, const char* how);
  void Merge(const std::string& group, double error, double bound, bool ok, std::int64_t compared,
             const std::string& message);

  std::vector<VerifyRow> rows_;
  std::string note_;
};

// The parts of a numerics file; each compares the quantities that it knows.
void VerifyFormats(const ops::Context& ctx, NumericsFile& file, NumericsTable& table);
void VerifyProducts(const ops::Context& ctx, NumericsFile& file, NumericsTable& table);
void VerifyRouting(const ops::Context& ctx, NumericsFile& file, NumericsTable& table);

}  // namespace cistron::train
