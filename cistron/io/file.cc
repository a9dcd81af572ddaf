#include "cistron/io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "cistron/base/error.h"
#include "cistron/base/log.h"

namespace cistron::io {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryPrefix = ".cistron-tmp-";

[[noreturn]] void ThrowIo(std::string_view action, const fs::path& path, int error) {
  const char* remedy = "";
  switch (error) {
    case ENOSPC:
    case EDQUOT: remedy = "; free some space, or write elsewhere"; break;
    case EACCES:
    case EPERM:
    case EROFS: remedy = "; choose a place that this user may write"; break;
    case EFBIG: remedy = "; the limit on the size of a file was reached (ulimit -f)"; break;
    case EMFILE: remedy = "; the limit on open files was reached (ulimit -n)"; break;
    default: break;
  }
  CISTRON_THROW(kIo, "{}: cannot {}: {}{}", path.string(), action,
                std::generic_category().message(error), remedy);
}

// Closes a file descriptor when it leaves the scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

fs::path ParentOf(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

// A name in the same directory that no one else uses: process and counter make it unique.
fs::path TemporaryBeside(const fs::path& path) {
  static std::atomic<unsigned> counter{0};
  return ParentOf(path) / fmt::format("{}{}-{}-{}", kTemporaryPrefix, path.filename().string(),
                                      static_cast<long>(::getpid()), counter.fetch_add(1));
}

// "a/b/" is "a/b" here: the final component is the name that is renamed.
fs::path WithoutTrailingSlash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

void CreateParents(const fs::path& path) {
  const fs::path parent = ParentOf(path);
  std::error_code error;
  if (!fs::create_directories(parent, error)) {
    if (error) ThrowIo("create the directory", parent, error.value());
    return;
  }
  SyncDirectory(ParentOf(WithoutTrailingSlash(parent)));
}

// Locks a file or directory without waiting; -1 when someone else holds it or it cannot be opened.
int TryLock(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return -1;
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd);
    return -1;
  }
  return fd;
}

void RemoveAllOrWarn(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) LogWarning("{}: cannot remove: {}", path.string(), error.message());
}

}  // namespace

std::string ReadFile(const fs::path& path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      CISTRON_THROW(kNotFound, "{}: no such file", path.string());
    }
    ThrowIo("open", path, errno);
  }
  std::string content;
  struct stat status = {};
  if (::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode)) {
    content.reserve(static_cast<std::size_t>(status.st_size));
  }
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) ThrowIo("read", path, errno);
    if (got == 0) return content;
    content.append(buffer, static_cast<std::size_t>(got));
  }
}

void SyncDirectory(const fs::path& directory) {
  const Descriptor fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) ThrowIo("open the directory", directory, errno);
  // Some file systems do not know fsync of a directory: they answer EINVAL.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) ThrowIo("sync the directory", directory, errno);
}

FileWriter::FileWriter(const fs::path& path, const fs::path& shown)
    : shown_(shown.empty() ? path : shown) {
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) ThrowIo("create the file", shown_, errno);
  // Held while the file is open: RemoveStaleTemporaries leaves it alone. Some file systems refuse.
  (void)::flock(fd_, LOCK_EX | LOCK_NB);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void FileWriter::Write(const void* data, std::size_t bytes) {
  constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // Linux writes at most 2 GiB a call
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_, p, std::min(bytes, kMostAtOnce));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) ThrowIo("write", shown_, errno);
    p += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void FileWriter::Close() {
  if (::fsync(fd_) != 0) ThrowIo("sync", shown_, errno);
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) ThrowIo("close", shown_, errno);
}

void WriteNewFile(const fs::path& path, std::string_view content) {
  FileWriter writer(path);
  writer.Write(content);
  writer.Close();
}

void CheckOutputFile(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    CISTRON_THROW(kAlreadyExists, "{}: is a directory, not a file to write", path.string());
  }
  if (!fs::is_directory(ParentOf(path), ignored)) {
    CISTRON_THROW(kNotFound, "{}: cannot be written: there is no directory {}; make it first",
                  path.string(), ParentOf(path).string());
  }
}

void WriteFileAtomically(const fs::path& path, std::string_view content) {
  CheckOutputFile(path);
  const fs::path temporary = TemporaryBeside(path);
  try {
    FileWriter writer(temporary, path);
    writer.Write(content);
    writer.Close();
    if (::rename(temporary.c_str(), path.c_str()) != 0) ThrowIo("replace the file", path, errno);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  SyncDirectory(ParentOf(path));
}

AtomicDirectory::AtomicDirectory(const fs::path& final_path)
    : final_(WithoutTrailingSlash(final_path)), temporary_(TemporaryBeside(final_)) {
  CreateParents(final_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) ThrowIo("create the directory", final_, errno);
  lock_fd_ = TryLock(temporary_);
}

AtomicDirectory::~AtomicDirectory() {
  if (!temporary_.empty()) RemoveAllOrWarn(temporary_);
  if (lock_fd_ >= 0) ::close(lock_fd_);
}

void AtomicDirectory::Commit(bool replace) {
  SyncDirectory(temporary_);
  // A plain rename replaces nothing but an empty directory.
  if (::rename(temporary_.c_str(), final_.c_str()) == 0) {
    temporary_.clear();
  } else {
    const int error = errno;
    if (error != EEXIST && error != ENOTEMPTY && error != ENOTDIR) {
      ThrowIo("rename the finished directory to its name", final_, error);
    }
    if (!replace) {
      CISTRON_THROW(kAlreadyExists, "{}: exists already; remove it or choose another name",
                    final_.string());
    }
    // One step, so that the name always holds the old directory or the new one.
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, final_.c_str(), RENAME_EXCHANGE) != 0) {
      if (errno != EINVAL && errno != ENOSYS) ThrowIo("exchange the directory", final_, errno);
      // A file system without exchange: the old directory moves aside first.
      const fs::path aside = TemporaryBeside(final_);
      if (::rename(final_.c_str(), aside.c_str()) != 0) ThrowIo("move aside", final_, errno);
      if (::rename(temporary_.c_str(), final_.c_str()) != 0) {
        const int failure = errno;
        if (::rename(aside.c_str(), final_.c_str()) != 0) {
          LogError("{}: the former directory is left as {}", final_.string(), aside.string());
        }
        ThrowIo("rename the finished directory to its name", final_, failure);
      }
      temporary_ = aside;
    }
    SyncDirectory(ParentOf(final_));
    RemoveAllOrWarn(temporary_);
    temporary_.clear();
    return;
  }
  SyncDirectory(ParentOf(final_));
}

void RemoveDirectoryAtomically(const fs::path& directory) {
  const fs::path name = WithoutTrailingSlash(directory);
  const fs::path aside = TemporaryBeside(name);
  if (::rename(name.c_str(), aside.c_str()) != 0) ThrowIo("remove", name, errno);
  std::error_code error;
  fs::remove_all(aside, error);
  if (error) ThrowIo("remove", aside, error.value());
}

bool IsTemporary(const fs::path& path) {
  return path.filename().string().starts_with(kTemporaryPrefix);
}

void RemoveStaleTemporaries(const fs::path& parent) {
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    if (!IsTemporary(it->path())) continue;
    const int fd = TryLock(it->path());
    if (fd < 0) continue;
    RemoveAllOrWarn(it->path());
    ::close(fd);
  }
}

}  // namespace cistron::io
