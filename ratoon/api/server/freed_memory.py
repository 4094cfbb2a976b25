"""Gives memory back to the system after large requests. The C library keeps what was freed, for each thread apart, and
a server that has once read large bodies would stay large for good."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import cache
from weakref import WeakSet

LARGE = 2**20  # bytes, or characters, of what is worth it
DELAY = 0.5  # seconds: the answer is on its way by then, and several requests need it once

_waiting: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def return_memory_soon(loop: asyncio.AbstractEventLoop) -> None:
    """To be called on the loop. It is done in a thread."""
    trim = _find_trim()
    if trim is None or loop in _waiting:
        return

    def begin() -> None:
        _waiting.discard(loop)
        loop.run_in_executor(None, trim, 0)

    _waiting.add(loop)
    loop.call_later(DELAY, begin)


@cache
def _find_trim() -> Callable[[int], int] | None:
    """None: this system's C library has no such call."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim
