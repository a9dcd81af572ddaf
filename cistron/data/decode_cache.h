// The cache of decoded gzip files: a directory of files named STEM-KEY.decoded.
//
// KEY hashes the absolute path, size, modification time and the first and last 64 KiB of the
// compressed file, so another content has another key. An entry appears by rename, complete and
// synced, or not at all; a use renews its modification time. When the entries exceed the limit,
// those used longest ago are removed (a process that reads one keeps it until it closes it).
// Everything in the directory may be deleted at any time.
#pragma once

#include <filesystem>

#include "cistron/data/byte_source.h"

namespace cistron::data {

// $XDG_CACHE_HOME/cistron, else ~/.cache/cistron, else a directory for this user under the system's
// temporary one.
std::filesystem::path DefaultCacheDirectory();

// Path of the decoded copy of a gzip file, made now if it is not there. Throws kBadInput when the
// gzip data are truncated or damaged, kIo when the cache cannot be written or the limit is too
// small.
std::filesystem::path DecodedCopy(const std::filesystem::path& gzip,
                                  const DecodeCacheOptions& options);

}  // namespace cistron::data
