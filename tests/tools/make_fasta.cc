// make_fasta: writes a FASTA file of random bases, the same bytes for the same arguments.
//
//   make_fasta BASES [RECORDS [LINE [SEED]]] > big.fa
//
// BASES in all, spread over RECORDS records (1) of lines of LINE bases (60). Every 4,096th block of
// 32 bases is lower case and every 16,384th is N, so that soft masks and degenerate bases occur.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cistron/base/philox.h"

namespace {

// The text of four bases for every byte.
std::array<std::array<char, 4>, 256> FourBases(const char* letters) {
  std::array<std::array<char, 4>, 256> table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    for (unsigned i = 0; i < 4; ++i) table[byte][i] = letters[byte >> (2 * i) & 3];
  }
  return table;
}

class Writer {
 public:
  Writer(std::int64_t line, std::uint64_t seed) : line_(line), random_(seed, "make_fasta") {}

  // False when standard output does not take the bytes.
  bool Record(std::int64_t index, std::int64_t bases) {
    out_ += ">record_" + std::to_string(index) + " random bases\n";
    std::int64_t column = 0;
    while (bases > 0) {
      Refill();
      for (std::size_t at = 0; at < block_.size() && bases > 0;) {
        const auto n = static_cast<std::size_t>(std::min<std::int64_t>(
            {static_cast<std::int64_t>(block_.size() - at), bases, line_ - column}));
        out_.append(block_, at, n);
        at += n;
        bases -= static_cast<std::int64_t>(n);
        column += static_cast<std::int64_t>(n);
        if (column == line_) {
          out_ += '\n';
          column = 0;
        }
      }
      if (out_.size() > (1u << 20) && !Flush()) return false;
    }
    if (column > 0) out_ += '\n';
    return Flush();
  }

 private:
  void Refill() {
    block_.clear();
    for (int part = 0; part < 128; ++part, ++block_index_) {
      if (block_index_ % 16384 == 16383) {
        block_.append(32, 'N');
        continue;
      }
      const auto& table = block_index_ % 4096 == 4095 ? lower_ : upper_;
      std::uint64_t bits =
          std::uint64_t{random_.Bits(2 * block_index_)} << 32 | random_.Bits(2 * block_index_ + 1);
      for (int i = 0; i < 8; ++i, bits >>= 8) block_.append(table[bits & 255].data(), 4);
    }
  }
  bool Flush() {
    const bool done = std::fwrite(out_.data(), 1, out_.size(), stdout) == out_.size();
    out_.clear();
    return done;
  }

  std::int64_t line_;
  cistron::RandomStream random_;
  std::uint64_t block_index_ = 0;
  std::string block_, out_;
  const std::array<std::array<char, 4>, 256> upper_ = FourBases("ACGT"), lower_ = FourBases("acgt");
};

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t bases = argc > 1 ? std::atoll(argv[1]) : 0;
  const std::int64_t records = argc > 2 ? std::atoll(argv[2]) : 1;
  const std::int64_t line = argc > 3 ? std::atoll(argv[3]) : 60;
  const std::uint64_t seed = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 1;
  if (bases < 1 || records < 1 || records > bases || line < 1) {
    std::fprintf(stderr, "usage: make_fasta BASES [RECORDS [LINE [SEED]]] > big.fa\n");
    return 2;
  }
  Writer writer(line, seed);
  for (std::int64_t r = 0; r < records; ++r) {
    const std::int64_t n = bases / records + (r < bases % records);
    if (!writer.Record(r, n)) {
      std::perror("make_fasta: standard output");
      return 1;
    }
  }
  return 0;
}
