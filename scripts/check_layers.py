#!/usr/bin/env python3
"""Checks that every #include keeps to the layers of ARCHITECTURE.md.

Usage: check_layers.py [ROOT]

A module sees only modules below it; modules on one line of LAYERS are siblings and do not see each other.
Tests may use cistron/testing, which sees everything. Headers of ops include no CUDA header, and libraries that
are slow to compile, or that must not leak to users, stay out of headers. Exit status 1 and one line a violation.
"""

import pathlib
import re
import sys

# Lowest first.
LAYERS = [
    ["base"],
    ["tensor"],
    ["check"],
    ["ops", "comm"],
    ["quant"],
    ["nn"],
    ["parallel"],
    ["optim", "io", "data"],
    ["model"],
    ["train"],
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
APPS_LEVEL = len(LAYERS)

SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')
CUDA = re.compile(r"^(cuda|cublas|cudnn|cute/|cutlass/|nccl|nvtx)")
# Libraries that only source files may include.
SOURCE_ONLY = re.compile(r"^(spdlog/|nlohmann/(?!json_fwd)|yaml-cpp/|CLI/|htslib/|oneapi/|hwy/|mpi\.h|omp\.h)")
KERNELS = "HWY_BEFORE_NAMESPACE"
OWN_HELPERS = re.compile(r"^namespace HWY_NAMESPACE \{\nnamespace \{", re.M)
LOG_ONLY = re.compile(r"^spdlog/")


def is_test(path):
    return path.stem.endswith(("_test", "_fuzz")) or "testing" in path.parts


def is_header(path):
    # `…-inl.h` files are parts of one source file, by Highway's convention.
    return path.suffix in {".h", ".cuh"} and not path.stem.endswith(("-inl", "_inl"))


def module_of(include):
    parts = include.split("/")
    return parts[1] if len(parts) >= 3 and parts[0] == "cistron" else None


def violations(path, text):
    """Yields (line number, message) for a file given by its path relative to the root."""
    parts = path.parts
    if parts[0] == "apps":
        own, level = "apps", APPS_LEVEL
    else:
        own = parts[1]
        if own == "testing":
            own, level = "testing", APPS_LEVEL
        elif own not in LEVEL:
            yield 0, f"module '{own}' has no place in LAYERS of scripts/check_layers.py"
            return
        else:
            level = LEVEL[own]
    if KERNELS in text and path.suffix == ".cc" and not OWN_HELPERS.search(text):
        yield 0, ("the kernels of a file belong into an unnamed namespace inside HWY_NAMESPACE: helpers of "
                  "the same name in two files would be merged by the linker")
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        include = match.group(1)
        if own == "ops" and path.suffix == ".h" and CUDA.match(include):
            yield number, f"a header of ops includes the CUDA header {include}"
        if is_header(path) and SOURCE_ONLY.match(include):
            yield number, f"a header includes {include}, which belongs into source files"
        if LOG_ONLY.match(include) and path.as_posix() != "cistron/base/log.cc":
            yield number, f"{include} is included outside cistron/base/log.cc"
        if include.startswith(("../", "./")) or (
            match.group(0).rstrip().endswith('"') and "/" not in include
        ):
            yield number, f"{include}: includes are written from the root, cistron/<module>/<file>"
        target = module_of(include)
        if target is None or target == own:
            continue
        if target == "testing":
            if not is_test(path):
                yield number, f"{include}: cistron/testing is for tests only"
        elif target not in LEVEL:
            yield number, f"{include}: module '{target}' has no place in LAYERS"
        elif LEVEL[target] == level and own != "testing":
            yield number, f"{own} includes {include}: {own} and {target} are siblings"
        elif LEVEL[target] > level:
            yield number, f"{own} includes {include}: {target} lies above {own}"


def check(root):
    found = []
    files = 0
    for top in ("cistron", "apps"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            files += 1
            relative = path.relative_to(root)
            for number, message in violations(relative, path.read_text(encoding="utf-8")):
                found.append(f"{relative}:{number}: {message}")
    return files, found


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    files, found = check(root)
    if files == 0:
        print(f"check_layers: no sources under {root}", file=sys.stderr)
        return 1
    for line in found:
        print(line)
    print(f"check_layers: {files} files, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
