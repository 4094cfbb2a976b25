"""The numbers that tests draw. A run draws the same ones as the run before, unless RATOON_TEST_SEED asks for others:

    RATOON_TEST_SEED=fresh    new ones, from a seed that is printed at the end of the run (`make test-fresh`)
    RATOON_TEST_SEED=42       those of seed 42 again

Hypothesis, the `random` module, numpy, torch, the programs of tests/native and the order of Python's sets follow it. A
draw depends on the seed and the test alone: neither on the tests before it nor on the process that runs it.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import sys

from hypothesis import HealthCheck, settings

VARIABLE = "RATOON_TEST_SEED"
FRESH = "fresh"
EXAMPLES_IN_FULL = 150  # of a property, in `make test-all`; a fifth of them in `make test` and in `make test-fresh`

# No profile has a deadline: how long an example takes depends on what else the machine does.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def settle() -> None:
    """Chooses the seed of this run. The environment keeps it: for the processes of pytest-xdist, and for those that
    tests start."""
    given = os.environ.get(VARIABLE)
    if given == FRESH:
        os.environ[VARIABLE] = str(secrets.randbelow(10**9))
    elif given is not None and not given.isdecimal():
        raise ValueError(f"{VARIABLE}: {given!r} is neither a number nor {FRESH!r}")
    # It has no effect in this process, whose sets have their order already.
    os.environ.setdefault("PYTHONHASHSEED", str(int(os.environ.get(VARIABLE, "0")) % 2**32))
    num_examples = EXAMPLES_IN_FULL if os.environ.get("RATOON_TESTS") == "all" else EXAMPLES_IN_FULL // 5
    settings.register_profile("default", derandomize=True, max_examples=num_examples, database=None, **_COMMON)
    settings.register_profile("fresh", max_examples=num_examples, database=None, print_blob=True, **_COMMON)
    settings.register_profile("thorough", max_examples=5000, print_blob=True, **_COMMON)
    chosen = "default" if VARIABLE not in os.environ else "fresh"
    settings.load_profile(os.environ.get("RATOON_HYPOTHESIS", chosen))
    _forget_loaded_modules()


def asked() -> int | None:
    """The seed that was asked for. None: the draws that every run repeats."""
    return int(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def examples(in_full: int) -> int:
    """Returns how many examples a property takes in this run, if it takes `in_full` in `make test-all`."""
    return in_full * min(settings.default.max_examples, EXAMPLES_IN_FULL) // EXAMPLES_IN_FULL


def seed_of(name: str) -> int:
    """A seed below 2**63 for what is drawn under this name."""
    digest = hashlib.sha256(f"{os.environ.get(VARIABLE, '')}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_generators(name: str) -> None:
    """Sets the generators that all code of a process shares: what a test draws does not depend on the tests before."""
    seed = seed_of(name)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.manual_seed(seed)


def how_to_repeat(failed: list[str]) -> list[str]:
    """Lines for the end of a run: what was drawn, and the command for each failed test of a run with a seed."""
    if asked() is None:
        return [f"draws: the same in every run; {VARIABLE}={FRESH} for new ones"]
    return [
        f"draws: those of {VARIABLE}={asked()}",
        *(f"repeat: {VARIABLE}={asked()} {os.path.relpath(sys.executable)} -m pytest -n 1 {name!r}" for name in failed),
    ]


def _forget_loaded_modules() -> None:
    """Hypothesis (since 6.131) also draws constants from the source of all modules that are loaded, so that the draws
    of a test would depend on the tests that ran before it in the same process. There is no setting for this;
    tests/unit/test_seeds.py notices if a version does it otherwise."""
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants  # which stay empty
