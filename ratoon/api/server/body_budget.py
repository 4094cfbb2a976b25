"""Memory for the bodies of all requests in flight: one limit in bytes, which API keys share.

A body has a place of the size that it announces before it is read, and keeps it until its request is answered. Without
a place nothing of it is read, so that the client's system holds it back (TCP); it waits for some seconds, and is then
answered with a 503. While others wait, a body of which nothing arrives any more loses its place. A part of the limit is
for small bodies alone: large ones can't take it.
"""

from __future__ import annotations

import asyncio

from ratoon.core.shares import SharedLimit

SMALL_BODY = 64 * 1024  # bytes: the HTTP server reads this much of a body before it is asked for it
SMALL_PART = 4  # one in so many bytes of the limit is for small bodies
WAIT_SECONDS = 10.0  # for a place
STALL_SECONDS = 5.0  # without a byte, after which a body may lose its place
LOOK_SECONDS = 0.5  # between looks for stalled bodies while others wait
MAX_WAITING = 128  # bodies that wait; of each the HTTP server holds what its last read brought


def room_for_large_bodies(limit: int) -> int:
    """Returns the part of the limit that bodies of any size may take."""
    return limit - limit // SMALL_PART


def least_limit(largest_body: int) -> int:
    """Returns the smallest limit that has room for a body of this size."""
    return -(-largest_body * SMALL_PART // (SMALL_PART - 1))


class BodyPlace:
    """The memory of one body. `give_back` it, however its request ends."""

    def __init__(self, pool: _Pool, owner: str | None, num_bytes: int) -> None:
        self.pool = pool
        self.owner = owner
        self.num_bytes = num_bytes
        self.is_lost = False  # others wait, and it has stalled
        self._reading: asyncio.Timeout | None = None  # while it is read
        self._last_arrival = 0.0

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Notes that the body is read from now on, within this timeout, which ends when the place is lost."""
        self._reading = timeout
        self.note_arrival()

    def note_arrival(self) -> None:
        self._last_arrival = asyncio.get_running_loop().time()

    def end(self) -> None:
        """Notes that all of the body is there: the place can't be lost any more."""
        self._reading = None

    def shrink(self, num_bytes: int) -> None:
        """Gives back what a body needs less than was thought."""
        if num_bytes < self.num_bytes:
            self.pool.free(self.owner, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes

    def give_back(self) -> None:
        self.end()
        self.shrink(0)
        self.pool.places.discard(self)

    def lose_if_stalled(self, now: float) -> None:
        if self._reading is not None and now - self._last_arrival >= STALL_SECONDS:
            self.is_lost = True
            self._reading.reschedule(now)
            self._reading = None


class _Waiting:
    def __init__(self, owner: str | None, num_bytes: int) -> None:
        self.owner = owner
        self.num_bytes = num_bytes
        self.granted: asyncio.Future[BodyPlace] = asyncio.get_running_loop().create_future()


class _Pool:
    def __init__(self, limit: int) -> None:
        self.places: set[BodyPlace] = set()
        self._held = SharedLimit(limit)
        self._num_waiting = SharedLimit(MAX_WAITING)
        self._waiting: list[_Waiting] = []  # in order of arrival
        self._looks: asyncio.TimerHandle | None = None  # for stalled bodies

    @property
    def num_bytes(self) -> int:
        return self._held.total

    async def take(self, owner: str | None, num_bytes: int) -> BodyPlace | None:
        """Returns a place; None: there is none, and there was none for as long as a client should wait."""
        if not self._num_waiting.held_by(owner) and self._held.take(owner, num_bytes):
            return self._place(owner, num_bytes)
        if not self._num_waiting.take(owner, 1):
            return None
        waiting = _Waiting(owner, num_bytes)
        self._waiting.append(waiting)
        self._look_later()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await asyncio.shield(waiting.granted)
        except TimeoutError:
            return waiting.granted.result() if waiting.granted.done() else None
        except asyncio.CancelledError:
            if waiting.granted.done():
                waiting.granted.result().give_back()
            raise
        finally:
            self._num_waiting.give_back(owner, 1)
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def free(self, owner: str | None, num_bytes: int) -> None:
        self._held.give_back(owner, num_bytes)
        passed: set[str | None] = set()  # owners whose next body has no room: later ones do not overtake it
        for waiting in list(self._waiting):
            if waiting.owner in passed:
                continue
            if self._held.take(waiting.owner, waiting.num_bytes):
                self._waiting.remove(waiting)
                waiting.granted.set_result(self._place(waiting.owner, waiting.num_bytes))
            else:
                passed.add(waiting.owner)

    def _place(self, owner: str | None, num_bytes: int) -> BodyPlace:
        place = BodyPlace(self, owner, num_bytes)
        self.places.add(place)
        return place

    def _look_later(self) -> None:
        if self._looks is None and self._waiting:
            self._looks = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = None
        waiting, now = {one.owner for one in self._waiting}, asyncio.get_running_loop().time()
        share = self._held.limit // max(1, self._held.num_owners)
        for place in self.places if waiting else ():
            if place.owner in waiting or self._held.held_by(place.owner) > share:  # not for another's sake
                place.lose_if_stalled(now)
        self._look_later()


class BodyBudget:
    def __init__(self, limit: int) -> None:
        large = room_for_large_bodies(limit)
        self._large, self._small = _Pool(large), _Pool(limit - large)

    @property
    def num_bytes(self) -> int:
        """The bytes that all bodies hold together."""
        return self._large.num_bytes + self._small.num_bytes

    async def take(self, owner: str | None, num_bytes: int) -> BodyPlace | None:
        """Returns a place; None: there is none, and there was none for as long as a client should wait."""
        num_bytes = max(1, num_bytes)
        return await (self._small if num_bytes <= SMALL_BODY else self._large).take(owner, num_bytes)
