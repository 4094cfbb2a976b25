"""A bounded queue of blocks between the steps and a slow storage: a thread writes them, and what waits can be read.

Where the queue is full, a new block waits for room, as long as one block after another is written; then it is not kept.
A block that is written again is written once. How blocks are written,
and what becomes of those that can't be, is known to the caller.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ratoon.distributed.block_bytes import joined

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 * 2**20
SECONDS_WITHOUT_ROOM = 5.0  # after which a storage has stalled


class WriteBehind:
    def __init__(self, name: str, write: Callable[[dict[bytes, bytearray]], None], max_at_once: int = 1) -> None:
        """`name`: of the thread. `write` gets the content of up to `max_at_once` blocks by their keys."""
        self._write = write
        self._max_at_once = max_at_once
        self._waiting: deque[bytes] = deque()  # keys that the thread has not taken
        self._content: dict[bytes, bytearray] = {}  # of blocks that are not written yet
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = self._has_stalled = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """The number of blocks that wait, or are being written."""
        return len(self._content)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Takes a copy of a block. Without room for it, waits as long as the storage takes others, then gives it up."""
        size = sum(part.nbytes for part in parts)
        with self._changed:
            if self._num_bytes + size > MAX_QUEUED_BYTES and not self._wait_for_room(size):
                return
        content = joined(parts)
        with self._changed:
            if key not in self._content:
                self._waiting.append(key)
                self._num_bytes += size
                self._content[key] = content
                self._changed.notify()

    def _wait_for_room(self, size: int) -> bool:
        if self._has_stalled or self._is_closed:
            return False
        while self._num_bytes + size > MAX_QUEUED_BYTES:
            num_left = len(self._content)
            self._changed.wait(SECONDS_WITHOUT_ROOM)
            if len(self._content) == num_left:
                self._has_stalled = True  # until the next block is written
                return False
        return True

    def get(self, key: bytes) -> bytearray | None:
        """Returns the content of a block that is not written yet."""
        return self._content.get(key)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                keys = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_at_once))]
            try:
                self._write({key: self._content[key] for key in keys})
            except Exception:
                logger.warning("%d blocks can't be saved", len(keys), exc_info=True)
            with self._changed:
                for key in keys:
                    self._num_bytes -= len(self._content.pop(key))
                self._has_stalled = False
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all that was taken is written, or given up."""
        with self._changed:
            while self._content:
                self._changed.wait()

    def close(self, patience: float) -> int:
        """Waits for the thread, as long as it writes blocks within so many seconds. Returns the number of blocks that
        are not written then: the thread is a daemon, and the process can end without it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        num_left = -1
        while self._thread.is_alive() and len(self._content) != num_left:
            num_left = len(self._content)
            self._thread.join(patience)
        return len(self._content) if self._thread.is_alive() else 0
