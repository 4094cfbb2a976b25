"""How many bytes of hidden states are held at a time, for all requests together, until their readers have taken them.

Room is reserved before the engine begins, and is free again when the last array with these states is gone: sent and
dropped, or never made. Owners (API keys) have equal shares, as everywhere.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from ratoon.core.errors import QueueFullError
from ratoon.core.shares import SharedLimit
from ratoon.core.sizes import format_size


class HiddenStatesBudget:
    def __init__(self, max_bytes: int | None = None) -> None:
        """None: there is no limit."""
        self._limit = None if max_bytes is None else SharedLimit(max_bytes)
        # Holds end with their last reference, perhaps in another thread: they are subtracted at the next use.
        self._ended: deque[tuple[str | None, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        self._count_off()
        return 0 if self._limit is None else self._limit.total

    def reserve(self, num_bytes: int, owner: str | None) -> Reservation | None:
        """Room for an answer. QueueFullError: readers have not taken what is held already."""
        if self._limit is None:
            return None
        self._count_off()
        if not self._limit.take(owner, num_bytes):
            raise QueueFullError(
                "hidden_states",
                f"{format_size(self._limit.total)} of hidden states wait for their readers, and this answer of "
                f"{format_size(num_bytes)} would exceed the limit of {format_size(self._limit.limit)} "
                "(max_total_hidden_states_bytes)",
                "try again in a moment",
            )
        return Reservation(self._ended, owner, num_bytes)

    def _count_off(self) -> None:
        while self._ended:
            owner, num_bytes = self._ended.popleft()
            assert self._limit is not None
            self._limit.give_back(owner, num_bytes)


class Reservation:
    """Room that is reserved as long as this object, or an array that it was kept for, exists."""

    __slots__ = ("_ended", "_num_bytes", "_owner")

    def __init__(self, ended: deque[tuple[str | None, int]], owner: str | None, num_bytes: int) -> None:
        self._ended = ended
        self._owner = owner
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        self._ended.append((self._owner, self._num_bytes))

    def keep_for(self, array: Any) -> None:
        """The reservation lasts at least as long as this array."""
        weakref.finalize(array, _let_go, self).atexit = False


def _let_go(hold: Reservation) -> None:
    """The array is gone, and with this call the reference to its hold."""
