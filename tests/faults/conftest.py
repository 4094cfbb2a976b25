"""Faults need many engine processes, and are not about how one starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked_engines import forked_engines


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> Iterator[None]:
    with forked_engines():
        yield
