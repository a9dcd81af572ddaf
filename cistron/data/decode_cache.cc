#include "cistron/data/decode_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <vector>

#include "cistron/base/env.h"
#include "cistron/base/error.h"
#include "cistron/base/log.h"

namespace cistron::data {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 18;
constexpr std::int64_t kWriteBack = 32 << 20;
constexpr std::int64_t kKeyBytes = 64 << 10;
// Compressed files above this take seconds to decode: say so.
constexpr std::uintmax_t kAnnounceBytes = 32 << 20;
constexpr std::string_view kSuffix = ".decoded";
constexpr std::string_view kTemporary = ".decoding-";

class File {
 public:
  File(const fs::path& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

std::string Reason() {
  return std::strerror(errno);
}

std::string Key(const fs::path& gzip, int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) CISTRON_THROW(kIo, "{}: {}", gzip.string(), Reason());
  std::string text = fmt::format("{}\n{}\n{}.{:09}\n", fs::absolute(gzip).string(), info.st_size,
                                 info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  for (const std::int64_t from :
       {std::int64_t{0}, std::max<std::int64_t>(0, info.st_size - kKeyBytes)}) {
    std::string ends(kKeyBytes, '\0');
    const ssize_t n = ::pread(fd, ends.data(), ends.size(), from);
    if (n < 0) CISTRON_THROW(kIo, "{}: {}", gzip.string(), Reason());
    text.append(ends, 0, static_cast<std::size_t>(n));
  }
  return fmt::format("{:016x}", static_cast<std::uint64_t>(XXH3_64bits(text.data(), text.size())));
}

void WriteAll(int fd, const fs::path& path, const char* data, std::size_t n) {
  while (n > 0) {
    const ssize_t written = ::write(fd, data, n);
    if (written < 0) {
      if (errno == EINTR) continue;
      CISTRON_THROW(kIo, "{}: cannot write the decoded copy: {}; free space, or set data.cache_dir",
                    path.string(), Reason());
    }
    data += written;
    n -= static_cast<std::size_t>(written);
  }
}

// Inflates every member of a gzip file into `out`.
void Inflate(int in, const fs::path& gzip, int out, const fs::path& target, std::int64_t limit) {
  struct Stream : z_stream {
    Stream() : z_stream{} {
      if (inflateInit2(this, 15 + 16) != Z_OK) CISTRON_THROW(kOutOfMemory, "zlib: inflateInit2");
    }
    ~Stream() { inflateEnd(this); }
  } z;
  std::vector<unsigned char> compressed(kBlock), decoded(kBlock);
  std::int64_t offset = 0, total = 0, started = 0;
  bool inside = true;  // in a member: the end of the file there means truncation
  for (;;) {
    const ssize_t n = ::pread(in, compressed.data(), compressed.size(), offset);
    if (n < 0) CISTRON_THROW(kIo, "{}: {}", gzip.string(), Reason());
    if (n == 0) break;
    offset += n;
    z.next_in = compressed.data();
    z.avail_in = static_cast<uInt>(n);
    do {
      if (!inside) {
        // Between members; zeros may pad the end (tapes, block devices).
        while (z.avail_in > 0 && *z.next_in == 0) {
          ++z.next_in;
          --z.avail_in;
        }
        if (z.avail_in == 0) break;
        inflateReset(&z);
        inside = true;
      }
      z.next_out = decoded.data();
      z.avail_out = static_cast<uInt>(decoded.size());
      const int result = inflate(&z, Z_NO_FLUSH);
      if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
        CISTRON_THROW(
            kBadInput,
            "{}: the gzip data are damaged ({}) near compressed byte {}; fetch the file again",
            gzip.string(), z.msg ? z.msg : "inflate failed", offset - z.avail_in);
      }
      const std::size_t size = decoded.size() - z.avail_out;
      total += static_cast<std::int64_t>(size);
      if (total > limit) {
        CISTRON_THROW(
            kIo,
            "{}: its decoded copy would exceed data.cache_limit_bytes = {}; raise the limit, "
            "or recompress the file with bgzip, which needs no copy",
            gzip.string(), limit);
      }
      WriteAll(out, target, reinterpret_cast<const char*>(decoded.data()), size);
      if (total - started > kWriteBack) {
        // The disk works while we decode; only the last fsync waits for it.
        ::sync_file_range(out, started, total - started, SYNC_FILE_RANGE_WRITE);
        started = total;
      }
      if (result == Z_STREAM_END) inside = false;
    } while (z.avail_in > 0 || z.avail_out == 0);
  }
  if (inside) {
    CISTRON_THROW(
        kBadInput,
        "{}: the gzip data end too early (truncated after {} decoded bytes); fetch the file "
        "again",
        gzip.string(), total);
  }
}

// Removes what a crash left behind and, oldest use first, entries beyond the limit.
void Prune(const fs::path& directory, const fs::path& keep, std::int64_t limit) {
  struct Entry {
    fs::file_time_type used;
    std::int64_t size;
    fs::path path;
  };
  std::vector<Entry> entries;
  std::int64_t total = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    const fs::file_time_type used = entry.last_write_time(ignored);
    if (name.find(kTemporary) != std::string::npos) {
      if (fs::file_time_type::clock::now() - used > std::chrono::hours(24)) {
        fs::remove(entry.path(), ignored);
      }
    } else if (name.ends_with(kSuffix)) {
      const auto size = static_cast<std::int64_t>(entry.file_size(ignored));
      total += size;
      if (entry.path() != keep) entries.push_back({used, size, entry.path()});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total <= limit) break;
    if (fs::remove(entry.path, ignored)) total -= entry.size;
  }
}

}  // namespace

fs::path DefaultCacheDirectory() {
  if (const auto xdg = GetEnv("XDG_CACHE_HOME")) return fs::path(*xdg) / "cistron";
  if (const auto home = GetEnv("HOME")) return fs::path(*home) / ".cache" / "cistron";
  return fs::temp_directory_path() / fmt::format("cistron-{}", ::getuid());
}

fs::path DecodedCopy(const fs::path& gzip, const DecodeCacheOptions& options) {
  const File in(gzip, O_RDONLY);
  if (in.fd() < 0) CISTRON_THROW(kIo, "{}: cannot open: {}", gzip.string(), Reason());
  const fs::path directory =
      options.directory.empty() ? DefaultCacheDirectory() : options.directory;
  std::string stem = gzip.stem().string();
  if (stem.size() > 64) stem.resize(64);
  const fs::path target = directory / fmt::format("{}-{}{}", stem, Key(gzip, in.fd()), kSuffix);
  if (::utimensat(AT_FDCWD, target.c_str(), nullptr, 0) == 0 || fs::exists(target)) return target;

  std::error_code failed;
  fs::create_directories(directory, failed);
  if (failed) {
    CISTRON_THROW(kIo, "{}: cannot make the cache directory: {}; set data.cache_dir",
                  directory.string(), failed.message());
  }
  if (fs::file_size(gzip) > kAnnounceBytes) {
    LogInfo("{}: decoding once into {}", gzip.string(), target.string());
  }
  fs::path temporary = target;
  temporary += fmt::format("{}{}-{:x}", kTemporary, ::getpid(),
                           std::chrono::steady_clock::now().time_since_epoch().count());
  try {
    const File out(temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (out.fd() < 0) {
      CISTRON_THROW(kIo, "{}: cannot write in the cache directory: {}; set data.cache_dir",
                    directory.string(), Reason());
    }
    Inflate(in.fd(), gzip, out.fd(), target, options.limit_bytes);
    if (::fsync(out.fd()) != 0 || ::rename(temporary.c_str(), target.c_str()) != 0) {
      CISTRON_THROW(kIo, "{}: cannot complete the decoded copy: {}", target.string(), Reason());
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  Prune(directory, target, options.limit_bytes);
  return target;
}

}  // namespace cistron::data
