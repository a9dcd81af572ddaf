// libFuzzer target of the sequence readers: FASTA or JSONL text. The first byte chooses alphabet,
// tags and chunk size; the rest is the file. Legal text must read back the same however it is cut
// and wherever one starts; everything else must throw cistron::Error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cistron/base/error.h"
#include "cistron/data/sequence_file.h"

using cistron::data::Alphabet;
using cistron::data::ByteTable;
using cistron::data::MemoryByteSource;
using cistron::data::SequenceFile;
using cistron::data::SequenceRules;

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  constexpr Alphabet kAlphabets[] = {Alphabet::kDna, Alphabet::kRna, Alphabet::kProtein,
                                     Alphabet::kBytes};
  SequenceRules rules;
  rules.table = &ByteTable::Of(kAlphabets[data[0] & 3]);
  if (data[0] & 4) rules.tag_delimiters = "|~";
  const std::int64_t chunk = 1 + (data[0] >> 3);
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    const SequenceFile cut("fuzz", MemoryByteSource(text, chunk), rules);
    const SequenceFile whole("fuzz", MemoryByteSource(text), rules);
    Require(cut.records().size() == whole.records().size());
    for (std::size_t r = 0; r < whole.records().size(); ++r) {
      const auto index = static_cast<std::int64_t>(r);
      const std::int64_t length = whole.records()[r].length;
      Require(length > 0 && cut.records()[r].length == length);
      Require(cut.RecordName(index) == whole.RecordName(index));
      std::string all, part;
      whole.Read(index, 0, length, all);
      Require(static_cast<std::int64_t>(all.size()) == length);
      for (const std::int64_t begin : {length / 3, length - 1}) {
        cut.Read(index, begin, length - begin, part);
        Require(all.compare(static_cast<std::size_t>(begin), std::string::npos, part) == 0);
      }
    }
  } catch (const cistron::Error&) {
    return 0;
  }
  return 0;
}
