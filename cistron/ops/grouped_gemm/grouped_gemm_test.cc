#include "cistron/ops/grouped_gemm/grouped_gemm.h"

#include <gtest/gtest.h>
