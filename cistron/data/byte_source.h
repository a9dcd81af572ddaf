// Files as random-access bytes, whatever their compression.
//
// Plain files are read in place, bgzip through htslib's BGZF layer. Plain gzip cannot seek: it is
// decoded once into a cache (decode_cache.h) and read from there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace cistron::data {

// Immutable decoded bytes. Read may be called from any number of threads after Scan has returned.
class ByteSource {
 public:
  virtual ~ByteSource() = default;

  // Reads everything once, in order, in chunks, and prepares Read. Call it first.
  virtual void Scan(const std::function<void(std::string_view)>& chunk) = 0;
  // Reads up to n bytes from an offset; fewer only at the end.
  virtual std::int64_t Read(std::int64_t offset, char* out, std::int64_t n) const = 0;
};

struct DecodeCacheOptions {
  std::filesystem::path directory;  // empty: DefaultCacheDirectory()
  std::int64_t limit_bytes = std::int64_t{16} << 30;
};

// Opens a file, its compression told from its first bytes. Throws kNotFound, kIo or kBadInput with
// the path: missing, a directory, empty, not readable, compressed by something else, truncated.
std::unique_ptr<ByteSource> OpenByteSource(const std::filesystem::path& path,
                                           const DecodeCacheOptions& cache);

// Bytes in memory, delivered to Scan in chunks of a given size: for tests and fuzzing.
std::unique_ptr<ByteSource> MemoryByteSource(std::string bytes, std::int64_t chunk = 1 << 20);

namespace internal {
// A plain file, read in place.
std::unique_ptr<ByteSource> PlainByteSource(const std::filesystem::path& path);
}  // namespace internal

}  // namespace cistron::data
