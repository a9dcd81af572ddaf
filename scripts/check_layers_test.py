#!/usr/bin/env python3
"""check_layers.py must find each kind of violation, and pass what is allowed."""

import pathlib
import tempfile
import unittest

import check_layers


def found(path, *lines):
    return [m for _, m in check_layers.violations(pathlib.PurePosixPath(path), "\n".join(lines))]


class Layers(unittest.TestCase):
    def test_below_is_allowed(self):
        self.assertEqual(found("cistron/ops/gemm/gemm.h", '#include "cistron/tensor/tensor.h"',
                               '#include "cistron/ops/context.h"', "#include <vector>"), [])
        self.assertEqual(found("apps/cistron/main.cc", '#include "cistron/train/loop.h"'), [])

    def test_above_is_refused(self):
        self.assertIn("lies above", found("cistron/tensor/tensor.h",
                                          '#include "cistron/ops/context.h"')[0])
        self.assertIn("lies above", found("cistron/nn/moe.cc",
                                          '# include "cistron/model/mixtral.h"')[0])

    def test_siblings_are_refused(self):
        self.assertIn("siblings", found("cistron/ops/reduce/reduce.cc",
                                        '#include "cistron/comm/transport.h"')[0])
        self.assertIn("siblings", found("cistron/data/fasta.cc",
                                        '#include "cistron/optim/adamw.h"')[0])

    def test_testing_is_for_tests(self):
        include = '#include "cistron/testing/random.h"'
        self.assertEqual(found("cistron/base/base_test.cc", include), [])
        self.assertEqual(found("cistron/testing/poison.cc", '#include "cistron/train/loop.h"'), [])
        self.assertIn("tests only", found("cistron/ops/gemm/gemm.cc", include)[0])

    def test_cuda_stays_out_of_op_headers(self):
        self.assertEqual(len(found("cistron/ops/gemm/gemm.h", "#include <cuda_runtime.h>")), 1)
        self.assertEqual(found("cistron/ops/gemm/gemm_launch.cu", "#include <cuda_runtime.h>"), [])

    def test_heavy_headers_stay_in_sources(self):
        self.assertEqual(len(found("cistron/model/config.h", "#include <nlohmann/json.hpp>")), 1)
        self.assertEqual(found("cistron/model/config.cc", "#include <nlohmann/json.hpp>"), [])
        self.assertEqual(len(found("cistron/train/loop.cc", "#include <spdlog/spdlog.h>")), 1)
        self.assertEqual(found("cistron/base/log.cc", "#include <spdlog/spdlog.h>"), [])
        self.assertEqual(found("cistron/ops/norm/norm-inl.h", '#include "hwy/highway.h"'), [])

    def test_kernels_keep_their_helpers(self):
        opening = ["HWY_BEFORE_NAMESPACE();", "namespace cistron::ops {", "namespace HWY_NAMESPACE {"]
        self.assertIn("unnamed namespace", found("cistron/ops/norm/norm_cpu.cc", *opening, "struct Tail;")[0])
        self.assertEqual(found("cistron/ops/norm/norm_cpu.cc", *opening, "namespace {"), [])
        self.assertEqual(found("cistron/ops/norm/norm-inl.h", *opening, "struct Tail;"), [])

    def test_paths_start_at_the_root(self):
        self.assertEqual(len(found("cistron/nn/moe.cc", '#include "moe.h"')), 1)
        self.assertEqual(len(found("cistron/nn/moe.cc", '#include "../ops/context.h"')), 1)

    def test_unknown_modules_are_refused(self):
        self.assertEqual(len(found("cistron/misc/x.h", "")), 1)
        self.assertEqual(len(found("cistron/train/x.h", '#include "cistron/misc/x.h"')), 1)

    def test_a_tree_with_a_violation_fails(self):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            (root / "cistron/base").mkdir(parents=True)
            (root / "cistron/base/a.h").write_text('#include "cistron/tensor/tensor.h"\n')
            files, lines = check_layers.check(root)
            self.assertEqual(files, 1)
            self.assertEqual(len(lines), 1)
            self.assertTrue(lines[0].startswith("cistron/base/a.h:1: "))


if __name__ == "__main__":
    unittest.main()
