"""The order in which large bodies become requests of the engine: a few at a time, and API keys in turns.

A body that is decoded takes ten times as much memory as its bytes, and more while it is rendered and tokenised. So only
the bytes are held, within their own limit (body_budget.py), until there is a place to prepare the request in. Small
bodies need none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_BODY = 64 * 1024  # bytes
LIMIT = 4 * 2**20  # bytes of bodies that are prepared at once; a larger one is prepared alone

Waiting = deque[tuple[asyncio.Future[None], int]]  # requests in order of arrival, with their sizes


class Preparation:
    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._waiting: OrderedDict[str | None, Waiting] = OrderedDict()  # by owner; the first one is next
        self.num_bytes = 0  # of the bodies that are being prepared

    @asynccontextmanager
    async def place(self, owner: str | None, size: int) -> AsyncIterator[Place]:
        """Holds a place for a body of this size during the block."""
        place = Place(self, owner, size if size > SMALL_BODY else 0)
        await place.take()
        try:
            yield place
        finally:
            place.give_back()

    async def take(self, owner: str | None, size: int) -> None:
        if not self._waiting and self._fits(size):
            self.num_bytes += size
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((granted, size))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(size)
            else:
                self._forget(owner, granted)
            raise

    def give_back(self, size: int) -> None:
        self.num_bytes -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + size <= self._limit

    def _grant(self) -> None:
        while self._waiting:
            owner, waiting = next(iter(self._waiting.items()))
            granted, size = waiting[0]
            if not self._fits(size):
                return  # the owner keeps its turn, or large bodies would never have one
            waiting.popleft()
            self._waiting.move_to_end(owner)
            if not waiting:
                del self._waiting[owner]
            self.num_bytes += size
            granted.set_result(None)

    def _forget(self, owner: str | None, granted: asyncio.Future[None]) -> None:
        waiting = deque(entry for entry in self._waiting[owner] if entry[0] is not granted)
        if waiting:
            self._waiting[owner] = waiting
        else:
            del self._waiting[owner]
        self._grant()  # it may have been the one that did not fit


class Place:
    """The right to prepare one request."""

    def __init__(self, preparation: Preparation, owner: str | None, size: int) -> None:
        self._preparation = preparation
        self._owner = owner
        self._size = size  # 0: a small body, which needs no place
        self._is_taken = False

    async def take(self) -> None:
        if self._size:
            await self._preparation.take(self._owner, self._size)
            self._is_taken = True

    def give_back(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._preparation.give_back(self._size)

    @asynccontextmanager
    async def left(self) -> AsyncIterator[None]:
        """Notes that the request waits for something else during the block, and others are prepared meanwhile."""
        self.give_back()
        yield
        await self.take()
