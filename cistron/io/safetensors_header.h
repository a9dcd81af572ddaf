// The header that SafetensorsWriter writes. Internal to io/.
#pragma once

#include <map>
#include <span>
#include <string>

#include "cistron/io/safetensors.h"

namespace cistron::io {

// Compact JSON, metadata first, padded with spaces to a multiple of 8 bytes.
std::string BuildSafetensorsHeader(std::span<const SafetensorsWriter::Spec> specs,
                                   const std::map<std::string, std::string>& metadata);

}  // namespace cistron::io
