#include "cistron/ops/permute/permute.h"

#include <gtest/gtest.h>
