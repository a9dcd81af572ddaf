// Files and directories written so that a crash leaves the old content or the new, never a half.
//
// A directory that must appear at once is filled under a temporary name beside its final one
// (`.cistron-tmp-…`), fsynced and renamed. The writer holds an advisory lock on the temporary
// directory, which the kernel drops when the process dies: a temporary directory without a lock is
// stale and may be removed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace cistron::io {

// Reads a whole file. Throws kNotFound or kIo with the path.
std::string ReadFile(const std::filesystem::path& path);

// Throws kNotFound when there is no directory to hold a file of this path, and kAlreadyExists when
// the path is a directory: to be asked before long work whose result goes there.
void CheckOutputFile(const std::filesystem::path& path);

// Temporary file, fsync, rename, fsync of the directory. Throws as CheckOutputFile does, and kIo
// with the path, never that of the temporary file, and the reason.
void WriteFileAtomically(const std::filesystem::path& path, std::string_view content);

// fsync of a directory: makes a rename in it durable.
void SyncDirectory(const std::filesystem::path& directory);

// A new file, written from front to back. Every failure throws kIo with the path and the reason.
class FileWriter {
 public:
  // Messages name `shown`; empty: `path`.
  explicit FileWriter(const std::filesystem::path& path, const std::filesystem::path& shown = {});
  ~FileWriter();  // closes without fsync when Close was not called
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void Write(const void* data, std::size_t bytes);
  void Write(std::string_view text) { Write(text.data(), text.size()); }
  void Close();  // fsync, then close

 private:
  std::filesystem::path shown_;
  int fd_ = -1;
};

// Writes a file with fsync, not atomically: for files inside an AtomicDirectory.
void WriteNewFile(const std::filesystem::path& path, std::string_view content);

// A directory that appears whole or not at all.
class AtomicDirectory {
 public:
  // Creates the parents of `final_path` and a temporary directory beside it. Throws kIo.
  explicit AtomicDirectory(const std::filesystem::path& final_path);
  ~AtomicDirectory();  // removes the temporary directory unless it was committed
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  // Where to write, before Commit.
  const std::filesystem::path& path() const { return temporary_; }
  // Makes the directory durable under its final name. One that is there already is exchanged in one
  // step and then removed when `replace` is set, else the call throws kAlreadyExists (an empty
  // directory is always replaced).
  void Commit(bool replace);

 private:
  std::filesystem::path final_;
  std::filesystem::path temporary_;
  int lock_fd_ = -1;
};

// Removes a directory such that a crash never leaves a part of it under its name.
void RemoveDirectoryAtomically(const std::filesystem::path& directory);

// Whether a path has the name of a temporary file or directory of this module.
bool IsTemporary(const std::filesystem::path& path);

// Removes temporary files and directories in `parent` that no living process holds. Never throws:
// what cannot be removed is logged.
void RemoveStaleTemporaries(const std::filesystem::path& parent);

}  // namespace cistron::io
