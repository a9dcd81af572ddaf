// Alphabets and the tokenizer of the field: one byte one token, id = ASCII code, vocabulary 256.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cistron::data {

enum class Alphabet { kDna, kRna, kProtein, kBytes };

inline constexpr std::int64_t kVocabSize = 256;
inline constexpr std::int64_t kEndToken = 0;
inline constexpr std::int64_t kPadToken = 1;
inline constexpr std::int64_t kBeginToken = 2;
inline constexpr std::int64_t kUnknownToken = 3;

// What a byte means in a sequence; several may hold.
enum ByteFlags : std::uint8_t {
  kBlank = 1,       // space, tab, carriage return: no base, skipped in FASTA
  kIllegal = 2,     // not of the alphabet
  kDegenerate = 4,  // legal, but stands for several letters (IUPAC) or none: its label is masked
  kLowerCase = 8,   // soft-masked
};

// How one alphabet reads bytes.
//
//   DNA      A C G T;       degenerate R Y K M S W B D H V N
//   RNA      A C G U;       the same degenerate codes
//   protein  the twenty, U, O and * (stop);  degenerate B J X Z and - (gap)
//   bytes    every byte but the four special ids; no case, nothing degenerate
// Lower-case letters mean what their capitals mean. DNA does not accept U nor RNA T: a file of the
// other kind would otherwise train with a quarter of its bases masked.
class ByteTable {
 public:
  static const ByteTable& Of(Alphabet alphabet);

  Alphabet alphabet() const { return alphabet_; }
  std::uint8_t flags(unsigned char byte) const { return flags_[byte]; }
  const std::uint8_t* data() const { return flags_.data(); }
  unsigned char Upper(unsigned char byte) const { return upper_[byte]; }
  // The complementary code (R ↔ Y, …), case kept. Identity outside DNA and RNA.
  unsigned char Complement(unsigned char byte) const { return complement_[byte]; }
  bool HasComplement() const { return alphabet_ == Alphabet::kDna || alphabet_ == Alphabet::kRna; }
  // The letters that are scored, upper case; empty for bytes, where all are.
  std::string_view OwnLetters() const;

 private:
  explicit ByteTable(Alphabet alphabet);
  Alphabet alphabet_;
  std::array<std::uint8_t, 256> flags_{};
  std::array<unsigned char, 256> upper_{};
  std::array<unsigned char, 256> complement_{};
};

// The smallest vocabulary that holds every token id of an alphabet: ids are byte values, ASCII for
// letters, anything for bytes.
std::int64_t SmallestVocabulary(Alphabet alphabet);

// What texts call one letter of a sequence: "base", "residue" or "byte"; the plural takes an s.
std::string_view UnitName(Alphabet alphabet);
// Letters that a model which knows nothing chooses from: 4, 20 or 256.
int AlphabetSize(Alphabet alphabet);
// "dna", "rna", "protein", "bytes".
std::string_view AlphabetName(Alphabet alphabet);
// The alphabet of that name; nothing for other texts.
std::optional<Alphabet> FindAlphabet(std::string_view name);

// What is wrong with an illegal byte and what to do: "character 'E' (0x45) is not DNA; …".
// `near` is text around it, by which protein is told from a stray character.
std::string ExplainIllegalByte(Alphabet alphabet, unsigned char byte, std::string_view near);

}  // namespace cistron::data
