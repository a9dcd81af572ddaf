// libcublasLt at run time.
#pragma once

#include <string>

namespace cistron::ops::internal {

// Why libcublasLt cannot be loaded, and what to do; empty when it is there.
const std::string& CublasMissing();

}  // namespace cistron::ops::internal
