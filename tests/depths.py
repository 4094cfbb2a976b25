"""Tests that run twice: with one step in flight, and with two.

A test that is marked `both_depths` builds its engines with the depth of its run, unless it sets `max_steps_in_flight`
itself. `make test-all` has both; `make test` has one of them, in turn, unless the test is `one_in(n)` or a `check`.
What such a test keeps for others (`functools.cache`) was computed at the depth that came first, so that answers of both
are compared with the same numbers, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEPTHS = (1, 2)
DEPTH_FIXTURE = "steps_in_flight"
both_depths = pytest.mark.usefixtures(DEPTH_FIXTURE)

_settings: dict[str, int] = {}


def depth_settings() -> dict[str, int]:
    """Settings of an engine in the test that runs: empty if that test is not about depths."""
    return dict(_settings)


@contextmanager
def engines_of_depth(depth: int) -> Iterator[None]:
    _settings["max_steps_in_flight"] = depth
    try:
        yield
    finally:
        _settings.clear()
