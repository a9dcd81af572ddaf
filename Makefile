# A thin front of the CMake presets (CMakePresets.json). `make help` lists the targets.
JOBS ?= $(shell nproc)
DEPS := scripts/install_deps.sh

.DEFAULT_GOAL := help
.PHONY: help build demo test cuda bench format tidy layers docs asan tsan fuzz install clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build:  ## the program, at build/release/bin/cistron
	@$(DEPS)
	cmake --preset release
	cmake --build build/release -j $(JOBS) --target cistron
	@echo "built build/release/bin/cistron"

demo: build  ## trains a mixture of experts on the E. coli genome and reports on it
	@scripts/demo.sh

test:  ## every test
	@$(DEPS) --test
	cmake --preset dev
	cmake --build build/dev -j $(JOBS)
	ctest --test-dir build/dev -j $(JOBS) --output-on-failure

cuda:  ## everything with the CUDA backend, and its tests (build/cuda/bin/cistron)
	@$(DEPS) --test
	@scripts/build_cuda.sh

bench:  ## micro-benchmarks, build/bench/bench
	@$(DEPS) --test
	cmake --preset bench
	cmake --build build/bench -j $(JOBS)

format:  ## formats the C++ files in place
	@scripts/format.sh --fix

tidy:  ## clang-tidy on changed files
	@scripts/tidy_changed.sh

layers:  ## the layer rules
	@python3 scripts/check_layers.py

docs:  ## links, paths and examples of the documents
	@python3 scripts/check_docs.py

asan:  ## every test under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/sanitize.sh asan

tsan:  ## the threaded parts under ThreadSanitizer
	@scripts/sanitize.sh tsan

fuzz:  ## every fuzz target for a minute
	@scripts/fuzz.sh

PREFIX ?= /usr/local
install: build  ## program, libraries, headers, configs under PREFIX (default /usr/local)
	cmake --build build/release -j $(JOBS)
	cmake --install build/release --prefix $(PREFIX)

clean:  ## removes build/ (runs/ stays)
	rm -rf build
