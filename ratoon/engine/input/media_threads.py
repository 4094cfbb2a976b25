"""Threads in which prompts with images and videos are read: owners take turns, so that one with many pictures does not
keep others waiting, and all other work that runs in threads has threads of its own. Decoding itself is in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from ratoon.core.turns import Turns
from ratoon.media.process import MAX_PROCESSES

NUM_THREADS = MAX_PROCESSES + 2  # one owner has all but one, and of these some find what was decoded before
T = TypeVar("T")


class MediaThreads:
    """Runs work on images and videos in threads, for one event loop, on which all methods are called."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._turns: Turns[asyncio.Future[None]] = Turns(num_threads)
        self._pool = ThreadPoolExecutor(num_threads, "media")  # starts threads when they are needed

    async def run(self, work: Callable[[], T], owner: str | None) -> T:
        """The result of `work`, which runs in a thread when it is the owner's turn. A caller that leaves while it runs
        does not make room for another job before its end."""
        loop = asyncio.get_running_loop()
        await self._wait_for_place(owner, loop.create_future())
        running = self._pool.submit(copy_context().run, work)

        def give_back(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, owner)

        running.add_done_callback(give_back)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_place(self, owner: str | None, place: asyncio.Future[None]) -> None:
        self._turns.add(owner, place)
        self._begin()
        try:
            await place
        except asyncio.CancelledError:
            if not self._turns.remove(owner, place):
                self._end(owner)  # it had got its place
            raise

    def _begin(self) -> None:
        while (found := self._turns.begin()) is not None:
            if not found[1].done():  # its caller has left, and gives the place back
                found[1].set_result(None)

    def _end(self, owner: str | None) -> None:
        self._turns.end(owner)
        self._begin()
