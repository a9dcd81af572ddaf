#include "cistron/data/alphabet.h"

#include <fmt/core.h>

#include "cistron/base/error.h"

namespace cistron::data {
namespace {

constexpr std::string_view kAminoAcids = "ACDEFGHIKLMNPQRSTVWYUO*";
constexpr std::string_view kNucleotideCodes = "RYKMSWBDHVN";
// Letters of proteins that no nucleotide code uses.
constexpr std::string_view kProteinOnly = "EFILPQZJOX";

bool Contains(std::string_view set, unsigned char c) {
  return set.find(static_cast<char>(c)) != std::string_view::npos;
}

unsigned char ToUpper(unsigned char c) {
  return c >= 'a' && c <= 'z' ? static_cast<unsigned char>(c - 'a' + 'A') : c;
}
unsigned char ToLower(unsigned char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<unsigned char>(c - 'A' + 'a') : c;
}

std::string Show(unsigned char byte) {
  if (byte > 0x20 && byte < 0x7f)
    return fmt::format("'{}' (0x{:02X})", static_cast<char>(byte), byte);
  return fmt::format("0x{:02X}{}", byte, byte == 0 ? " (NUL)" : byte == ' ' ? " (space)" : "");
}

}  // namespace

ByteTable::ByteTable(Alphabet alphabet) : alphabet_(alphabet) {
  std::string_view degenerate;
  if (alphabet == Alphabet::kDna || alphabet == Alphabet::kRna) degenerate = kNucleotideCodes;
  if (alphabet == Alphabet::kProtein) degenerate = "BJXZ-";
  for (int i = 0; i < 256; ++i) {
    const auto byte = static_cast<unsigned char>(i);
    const unsigned char upper = ToUpper(byte);
    upper_[byte] = complement_[byte] = byte;
    if (alphabet == Alphabet::kBytes) {
      flags_[byte] = byte <= kUnknownToken ? kIllegal : 0;
      continue;
    }
    upper_[byte] = upper;
    if (Contains(OwnLetters(), upper)) {
      flags_[byte] = 0;
    } else if (Contains(degenerate, upper)) {
      flags_[byte] = kDegenerate;
    } else {
      flags_[byte] = kIllegal;
    }
    if (upper != byte) flags_[byte] |= kLowerCase;
  }
  for (const unsigned char blank : {' ', '\t', '\r'}) {
    flags_[blank] = kBlank | (flags_[blank] & kIllegal);
  }
  if (HasComplement()) {
    const char t = alphabet == Alphabet::kDna ? 'T' : 'U';
    const char pairs[][2] = {{'A', t}, {'C', 'G'}, {'R', 'Y'}, {'K', 'M'}, {'B', 'V'}, {'D', 'H'}};
    for (const auto& [a, b] : pairs) {
      const auto x = static_cast<unsigned char>(a), y = static_cast<unsigned char>(b);
      complement_[x] = y;
      complement_[y] = x;
      complement_[ToLower(x)] = ToLower(y);
      complement_[ToLower(y)] = ToLower(x);
    }
  }
}

const ByteTable& ByteTable::Of(Alphabet alphabet) {
  static const ByteTable dna(Alphabet::kDna), rna(Alphabet::kRna), protein(Alphabet::kProtein),
      bytes(Alphabet::kBytes);
  switch (alphabet) {
    case Alphabet::kDna: return dna;
    case Alphabet::kRna: return rna;
    case Alphabet::kProtein: return protein;
    case Alphabet::kBytes: return bytes;
  }
  CISTRON_THROW(kInternal, "ByteTable: unknown alphabet {}", static_cast<int>(alphabet));
}

std::string_view ByteTable::OwnLetters() const {
  switch (alphabet_) {
    case Alphabet::kDna: return "ACGT";
    case Alphabet::kRna: return "ACGU";
    case Alphabet::kProtein: return kAminoAcids;
    case Alphabet::kBytes: return "";
  }
  return "";
}

std::int64_t SmallestVocabulary(Alphabet alphabet) {
  return alphabet == Alphabet::kBytes ? kVocabSize : 128;
}

std::string_view UnitName(Alphabet alphabet) {
  switch (alphabet) {
    case Alphabet::kDna:
    case Alphabet::kRna: return "base";
    case Alphabet::kProtein: return "residue";
    case Alphabet::kBytes: return "byte";
  }
  return "letter";
}

int AlphabetSize(Alphabet alphabet) {
  switch (alphabet) {
    case Alphabet::kDna:
    case Alphabet::kRna: return 4;
    case Alphabet::kProtein: return 20;
    case Alphabet::kBytes: return 256;
  }
  return 1;
}

std::string_view AlphabetName(Alphabet alphabet) {
  switch (alphabet) {
    case Alphabet::kDna: return "dna";
    case Alphabet::kRna: return "rna";
    case Alphabet::kProtein: return "protein";
    case Alphabet::kBytes: return "bytes";
  }
  return "unknown";
}

std::optional<Alphabet> FindAlphabet(std::string_view name) {
  for (const Alphabet a : {Alphabet::kDna, Alphabet::kRna, Alphabet::kProtein, Alphabet::kBytes}) {
    if (AlphabetName(a) == name) return a;
  }
  return std::nullopt;
}

std::string ExplainIllegalByte(Alphabet alphabet, unsigned char byte, std::string_view near) {
  const std::string what =
      fmt::format("character {} is not of the alphabet '{}'", Show(byte), AlphabetName(alphabet));
  if (byte == 0) return what + "; the file is binary or damaged: give text";
  if (alphabet == Alphabet::kBytes) {
    return what + " (bytes 0 to 3 are the special tokens); remove it";
  }
  if (alphabet == Alphabet::kProtein) {
    return what + "; letters, '*' and '-' are legal: remove it, or set data.alphabet=bytes";
  }
  const unsigned char upper = ToUpper(byte);
  int protein = Contains(kProteinOnly, upper);
  for (const char c : near) {
    protein += Contains(kProteinOnly, ToUpper(static_cast<unsigned char>(c)));
  }
  const bool residue = Contains(kAminoAcids, upper) || Contains(kProteinOnly, upper);
  if (protein > 0 && residue) return what + "; this looks like protein: set data.alphabet=protein";
  if (upper == 'U') return what + "; this looks like RNA: set data.alphabet=rna";
  if (upper == 'T') return what + "; this looks like DNA: set data.alphabet=dna";
  if (byte == '-' || byte == '.') {
    return what + "; this looks like an alignment: remove its gaps";
  }
  return what + "; bases and IUPAC codes (RYKMSWBDHVN) are legal: correct it or write N";
}

}  // namespace cistron::data
