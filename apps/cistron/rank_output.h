// The output of all ranks as lines: `mpirun --tag-output` writes them into one stream, each piece
// after a tag, "[1,0]<stdout>:".
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace cistron::app {

class RankOutput {
 public:
  // Without a rank: a line of mpirun's own. Lines come without their newline.
  using OnLine = std::function<void(int rank, const std::string& line)>;
  static constexpr int kLauncher = -1;

  explicit RankOutput(OnLine on_line) : on_line_(std::move(on_line)) {}
  // The next bytes of the stream, cut anywhere.
  void Add(std::string_view bytes);
  // At the end of the stream: what has no newline is a line, too.
  void Finish();

 private:
  void Take(std::string_view bytes);

  OnLine on_line_;
  std::string pending_;  // may be the beginning of a tag
  int rank_ = kLauncher;
  std::map<int, std::string> partial_;  // begun lines, by rank
};

}  // namespace cistron::app
