// Files written so that a crash leaves the old content or the new, never a half.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace cistron::io {

// Reads a whole file. Throws kNotFound or kIo with the path.
std::string ReadFile(const std::filesystem::path& path);
// Temporary file, fsync, rename, fsync of the directory. Throws kIo with the path and reason.
void WriteFileAtomically(const std::filesystem::path& path, std::string_view content);
// fsync of a directory: makes a rename in it durable.
void SyncDirectory(const std::filesystem::path& directory);

}  // namespace cistron::io
