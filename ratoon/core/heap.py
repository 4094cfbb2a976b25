"""The heap of this process, as the C library's allocator has it: how much of it is in use, and giving back what is not.

Native libraries that are given hostile inputs allocate and free much. What they free stays with the process, in pieces
between what is in use, until it is trimmed. Both functions need glibc; elsewhere they do nothing, and say so.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


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


@cache
def _function(name: str, result: Any) -> Any:
    """A function of the C library, called without Python's lock. None: it has none of this name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    function.restype = result
    return function
