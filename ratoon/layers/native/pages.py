"""Memory for packed weights, keys and values: in large pages where the system has them, so that a pass translates few
addresses. Pieces of weights share a mapping, which is given back when the last of them is gone."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch

Tensor = torch.Tensor

LARGE_PAGE = 2 << 20
MAPPING = 16 * LARGE_PAGE  # bytes; larger pieces have one of their own
ALIGNMENT = 64  # of a piece: a cache line

_lock = threading.Lock()
_left = torch.empty(0, dtype=torch.uint8)  # what no piece has taken of the last mapping


def new_weight(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor for a weight, not initialised."""
    global _left
    num_bytes = math.prod(shape) * dtype.itemsize
    taken = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if taken > MAPPING:
        piece = new_pages(taken)
    else:
        with _lock:
            if taken > len(_left):
                _left = new_pages(MAPPING)
            piece, _left = _left[:taken], _left[taken:]
    return piece[:num_bytes].view(dtype).view(shape)


def new_pages(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros. Pages are committed when they are first written."""
    memory = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % LARGE_PAGE
    return whole[first : first + num_bytes]
