"""Copies of the bytes of blocks, which other threads need not wait for: a block can have megabytes, and the steps of a
GPU go on meanwhile. An assignment of slices holds the interpreter, a copy by numpy does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def copy_bytes(target: memoryview | bytearray, source: memoryview | bytearray | bytes) -> None:
    """Copies a buffer to another one of its size."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def joined(parts: Sequence[memoryview]) -> bytearray:
    """Returns a copy of the bytes of a block."""
    content = bytearray(sum(part.nbytes for part in parts))
    start, view = 0, memoryview(content)
    for part in parts:
        copy_bytes(view[start : start + part.nbytes], part)
        start += part.nbytes
    return content


def fill(parts: Sequence[memoryview], content: memoryview | bytearray | bytes) -> bool:
    """Writes the bytes of a block to its parts. False: it has another size."""
    if len(content) != sum(part.nbytes for part in parts):
        return False
    start, view = 0, memoryview(content)
    for part in parts:
        copy_bytes(part, view[start : start + part.nbytes])
        start += part.nbytes
    return True
