"""Fixtures that several files of this folder use."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.consoles import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Starts a browser for the tests of one file. It ends with them, because Playwright keeps the thread's event loop
    for itself."""
    with browser() as started:
        yield started
