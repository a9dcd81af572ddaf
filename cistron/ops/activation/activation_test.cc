#include "cistron/ops/activation/activation.h"

#include <gtest/gtest.h>
