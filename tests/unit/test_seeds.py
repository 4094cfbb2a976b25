"""What tests draw is the same in every run and in any order of tests, and follows a seed on request."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import seeds

ROOT = Path(__file__).parents[2]

# Values that hypothesis draws in a process; first, modules of ours are loaded, or none.
PROGRAM = """
import sys
from tests import seeds
seeds.settle()
from hypothesis import given, settings, strategies as st
for name in sys.argv[1:]:
    __import__(name)
drawn = []

@given(st.integers(), st.floats(allow_nan=False), st.text(), st.sets(st.text(), max_size=3))
def draw(number, fraction, text, texts):
    drawn.append((number, fraction, text, list(texts)))

draw()
print(drawn)
"""
MODULES = ("ratoon.core.config", "ratoon.core.params", "ratoon.memory.block_pool", "ratoon.scheduling.scheduler")


def drawn(*modules: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    environment.pop(seeds.VARIABLE, None)
    command = [sys.executable, "-c", PROGRAM, *modules]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_draws_do_not_depend_on_the_modules_that_are_loaded() -> None:
    first = drawn()
    assert len(first) > 1000
    assert drawn(*MODULES) == first


def test_the_generators_of_a_process_follow_the_name_of_a_test() -> None:
    def draw(name: str) -> tuple[float, float, float]:
        seeds.seed_generators(name)
        return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002

    one, other = draw("one"), draw("other")
    assert draw("one") == one
    assert all(left != right for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("_", range(2))
def test_what_a_test_draws_does_not_depend_on_the_tests_before_it(_: int, request: pytest.FixtureRequest) -> None:
    here = random.random(), float(torch.rand(()))
    seeds.seed_generators(request.node.nodeid)
    assert (random.random(), float(torch.rand(()))) == here


def test_a_seed_changes_what_is_drawn_and_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seeds.VARIABLE, raising=False)
    fixed = seeds.seed_of("kernels")
    monkeypatch.setenv(seeds.VARIABLE, "7")
    seven = seeds.seed_of("kernels")
    monkeypatch.setenv(seeds.VARIABLE, "8")
    assert len({fixed, seven, seeds.seed_of("kernels")}) == 3
    monkeypatch.setenv(seeds.VARIABLE, "7")
    assert seeds.seed_of("kernels") == seven and 0 <= seven < 2**63


def test_the_end_of_a_run_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seeds.VARIABLE, raising=False)
    (line,) = seeds.how_to_repeat(["tests/a.py::test"])
    assert "RATOON_TEST_SEED=fresh" in line
    monkeypatch.setenv(seeds.VARIABLE, "7")
    seed, command = seeds.how_to_repeat(["tests/a.py::test[x y]"])
    assert "RATOON_TEST_SEED=7" in seed
    assert command.startswith("repeat: RATOON_TEST_SEED=7 ") and command.endswith(
        "-m pytest -n 1 'tests/a.py::test[x y]'"
    )


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "-x")
    with pytest.raises(ValueError, match="RATOON_TEST_SEED: '-x' is neither a number nor 'fresh'"):
        seeds.settle()
