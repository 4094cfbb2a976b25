"""The heap of this process, as the C library's allocator has it: how much of it is in use, and giving back what is not.

Native libraries that are given hostile inputs allocate and free much. What they free stays with the process, in pieces
between what is in use, until it is trimmed. Both need glibc; elsewhere they do nothing, and say so.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


MIN_FREED_BYTES = 8 * 2**20  # after which memory is given back
DELAY_SECONDS = 1.0  # before that, so that one call serves all that ends together; a call takes 5 to 30 ms


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def used_bytes() -> int | None:
    """Bytes that are allocated. It walks over what is free, which takes milliseconds in a process that has freed much.
    None: the C library does not tell."""
    tell = _function("mallinfo2", _MallocInfo)
    if tell is None:
        return None
    told = tell()
    return int(told.uordblks + told.hblkhd)


def give_back() -> bool:
    """Return free pages to the system, those in the middle of the heap as well. False: the C library can't."""
    trim = _function("malloc_trim", ctypes.c_int)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


class HeapTrimmer:
    """Gives memory back soon after much of it was freed, in a thread of its own, which begins with the first bytes."""

    def __init__(self, trim: Callable[[], object] = give_back, delay_seconds: float = DELAY_SECONDS) -> None:
        self._trim = trim
        self._delay_seconds = delay_seconds
        self._freed: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: no more
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heap", daemon=True)
            self._thread.start()

    def note_freed(self, num_bytes: int) -> None:
        """From any thread, from a destructor as well."""
        self._freed.put(num_bytes)

    def close(self) -> None:
        self._freed.put(None)

    def _run(self) -> None:
        num_freed = 0
        while (freed := self._freed.get()) is not None:
            num_freed += freed
            if num_freed >= MIN_FREED_BYTES:
                time.sleep(self._delay_seconds)
                self._trim()
                num_freed = 0


@cache
def _function(name: str, result: Any) -> Any:
    """A function of the C library, called without Python's lock. None: it has none of this name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    function.restype = result
    return function
