"""Threads for work that would block the event loop, such as reading a large body or tokenising a long text.

Work is sorted into lanes by its size, each with its own threads: short work never waits for long work, and
only one piece of the largest work is in memory at a time. Work that is cancelled before it starts is dropped.

After large work, memory is returned to the system: the C library keeps freed memory per thread, and a server that
once read large bodies would stay large.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakSet

from ratoon.core.heap import give_back

LARGE = 2**20  # bytes, or characters, of work after which memory is returned
DELAY = 0.5  # seconds: the answer is sent by then, and one call serves several requests

_waiting: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def return_memory_soon(loop: asyncio.AbstractEventLoop) -> None:
    """Has freed memory returned to the system; to be called on the event loop; runs in a thread."""
    if loop in _waiting:
        return

    def begin() -> None:
        _waiting.discard(loop)
        loop.run_in_executor(None, give_back)

    _waiting.add(loop)
    loop.call_later(DELAY, begin)


T = TypeVar("T")


class Lane(NamedTuple):
    below: float  # sizes, in bytes or characters
    num_threads: int


SLOW = 64 * 1024  # the size of short work that may be slow nevertheless
LANES = (Lane(SLOW, 2), Lane(LARGE, 1), Lane(math.inf, 1))


class WorkLanes:
    def __init__(self, name: str, shortest: int, lanes: tuple[Lane, ...] = LANES) -> None:
        """Work whose size is below `shortest` runs directly: it takes no longer than waking a thread."""
        self._shortest = shortest
        self._lanes = [(lane.below, ThreadPoolExecutor(lane.num_threads, f"{name}-{lane.below}")) for lane in lanes]

    async def run(self, size: float, work: Callable[[], T]) -> T:
        if size < self._shortest:
            return work()
        threads = next(threads for below, threads in self._lanes if size < below)
        loop = asyncio.get_running_loop()
        job = _Job(work)
        try:
            return await loop.run_in_executor(threads, job)
        finally:
            job.drop()
            if size >= LARGE:
                return_memory_soon(loop)


LONG_TEXT = 2048  # characters: a shorter text is tokenised faster than a thread starts

lanes = WorkLanes("work", LONG_TEXT)  # of all requests: tokenising, rendering, and building and encoding answers


async def off_loop(size: float, work: Callable[[], T]) -> T:
    """Runs short work directly, else in a thread. `size` is that of the text which takes as long to tokenise."""
    return await lanes.run(size, work)


class _Job(Generic[T]):
    """Releases its input when it is cancelled, however long it stays in a queue."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work

    def __call__(self) -> T:
        work = self._work
        if work is None:
            raise asyncio.CancelledError
        return work()

    def drop(self) -> None:
        self._work = None
