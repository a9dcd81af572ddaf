// manifest.json of a checkpoint: what is where. Internal to io/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "cistron/base/dtype.h"
#include "cistron/io/box.h"

namespace cistron::io {

struct StoredBox {
  Box box;
  std::string file;            // beside the manifest
  std::string key;             // the tensor's name in that file
  std::uint64_t checksum = 0;  // XXH3, 64 bits, of its bytes
};

struct ManifestTensor {
  DType dtype = DType::kF32;
  Shape shape;  // global
  std::vector<StoredBox> boxes;
};

struct Manifest {
  std::int64_t step = 0;
  std::string state_json = "{}";
  std::map<std::string, ManifestTensor> tensors;
  std::map<std::string, std::uint64_t> file_bytes;
};

// XXH3, 64 bits.
std::uint64_t Checksum(const void* data, std::size_t bytes);

// Text with a checksum of its own. Throws kInvalidArgument when the state is not JSON.
std::string ToJson(const Manifest& manifest);
// Parses and checks everything that can be checked without the files. Throws kBadInput or, for a
// later version of the format, kUnsupported. kPart: what one of several writers holds, whose boxes
// need not cover the tensors.
enum class Cover { kWhole, kPart };
Manifest ParseManifest(std::string_view text, const std::string& origin,
                       Cover cover = Cover::kWhole);
// The boxes and files of one writer join those of others. Throws kInvalidArgument where the two
// disagree about a tensor or have written the same file.
void Merge(const Manifest& part, Manifest& into);
// Throws kInvalidArgument, naming the tensor, unless the boxes of each cover it exactly once.
void CheckCover(const Manifest& manifest);

}  // namespace cistron::io
