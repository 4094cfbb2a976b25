"""Fixtures of several files of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.consoles import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser of the tests of one file. It ends with them: Playwright keeps the thread's event loop for itself."""
    with browser() as started:
        yield started
