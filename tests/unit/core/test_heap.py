"""The heap of this process: what is in use is counted, and what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import queue
import sys

import pytest

from ratoon.core.heap import MIN_FREED_BYTES, HeapTrimmer, give_back, used_bytes
from tests.faults.processes import resident_bytes
from tests.waiting import PATIENCE

NUM_PIECES = 4096
PIECE_BYTES = 8192  # below the size for which the C library has pages of their own

pytestmark = pytest.mark.skipif(used_bytes() is None, reason="the C library does not tell what is in use")


def test_what_is_allocated_is_counted_and_what_is_freed_is_not() -> None:
    before = used_bytes()
    assert before is not None
    data = [ctypes.create_string_buffer(PIECE_BYTES) for _ in range(NUM_PIECES)]
    while_used = used_bytes()
    assert while_used is not None and while_used - before >= NUM_PIECES * PIECE_BYTES
    del data
    after = used_bytes()
    assert after is not None and abs(after - before) < NUM_PIECES * PIECE_BYTES // 8


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_pages_between_what_is_in_use_go_back() -> None:
    data = [ctypes.create_string_buffer(b"x", PIECE_BYTES) for _ in range(2 * NUM_PIECES)]
    full = resident_bytes(os.getpid())
    kept = [piece for index, piece in enumerate(data) if index % 16 == 0]  # holes between them, at no end of the heap
    del data
    assert give_back()
    assert full - resident_bytes(os.getpid()) > NUM_PIECES * PIECE_BYTES
    del kept


def test_memory_is_given_back_after_much_was_freed() -> None:
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    trimmer = HeapTrimmer(lambda: calls.put(1), delay_seconds=0.0)
    trimmer.start()
    for _ in range(3):
        trimmer.note_freed(MIN_FREED_BYTES // 2)
    calls.get(timeout=PATIENCE)
    trimmer.note_freed(MIN_FREED_BYTES // 4)
    trimmer.close()
    assert trimmer._thread is not None
    trimmer._thread.join(PATIENCE)
    assert not trimmer._thread.is_alive() and calls.empty(), "too little was freed since"
