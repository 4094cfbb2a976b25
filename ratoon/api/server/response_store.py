"""Stored responses: what was asked, what was answered, and the conversation that the next turn continues.

Bounded in number and in bytes: the least recently used one of the owner that has most of them is evicted, and never
one that is being generated. The tokens, and their memory, are the engine's (engine/roots.py); a response has the
same id there.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.api.server.response_items import Item
from ratoon.api.server.transcripts import Transcript

QUEUED, IN_PROGRESS = "queued", "in_progress"
COMPLETED, INCOMPLETE, FAILED, CANCELLED = "completed", "incomplete", "failed", "cancelled"
CONTINUABLE = (COMPLETED, INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One response's part of a conversation, after those before it. Responses that continue the same one share it."""

    before: Turn | None
    items: tuple[Item, ...]  # input, then output
    num_bytes: int  # of all turns up to this one

    @classmethod
    def after(cls, before: Turn | None, items: tuple[Item, ...]) -> Turn:
        earlier = 0 if before is None else before.num_bytes
        return cls(before, items, earlier + len(msgspec.json.encode(items)))


def items_of(turn: Turn | None) -> list[Item]:
    """Of the whole conversation."""
    turns = []
    while turn is not None:
        turns.append(turn)
        turn = turn.before
    return [item for turn in reversed(turns) for item in turn.items]


class EventLog:
    """The events of a response that runs in the background, encoded, by their sequence numbers. Any number of readers
    follow it, each at its own speed."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def append(self, events: list[bytes]) -> None:
        self._events += events
        self.num_bytes += sum(map(len, events))
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """From the event with this number on, to the last one."""
        while True:
            new = self._events[start:]
            if new:
                start += len(new)
                yield b"".join(new)
            elif self._ended:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False, slots=True)
class StoredResponse:
    id: str
    owner: str | None
    head: dict[str, Any]  # fields of the answer that do not change
    before: Turn | None  # the conversation that it continues
    input: tuple[Item, ...]
    created_at: float = field(default_factory=time.time)
    completed_at: float | None = None
    status: str = QUEUED
    output: list[Item] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    continuation: dict[str, Any] | None = None
    prompt: Transcript = ()  # of its prompt; empty: it has not begun
    transcript: Transcript = ()  # of prompt and answer; empty until the next turn needs it
    snapshot: Callable[[], None] | None = None  # puts the output so far into `output`, while it is generated
    log: EventLog | None = None  # only of one that runs in the background and was asked to stream
    work: asyncio.Task[None] | None = None  # of one that runs in the background
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _turn: Turn | None = None
    _head_bytes: int | None = None

    @property
    def is_running(self) -> bool:
        return self.status in (QUEUED, IN_PROGRESS)

    @property
    def turn(self) -> Turn:
        """The conversation up to its end."""
        if self._turn is not None:
            return self._turn
        turn = Turn.after(self.before, (*self.input, *self.output))
        if not self.is_running:
            self._turn = turn
        return turn

    @property
    def num_bytes(self) -> int:
        """At most: turns and texts that several responses share count for each of them."""
        if self._head_bytes is None:
            self._head_bytes = len(msgspec.json.encode(self.head))
        texts = sum(len(segment.text) for segment in self.prompt)
        return self._head_bytes + self.turn.num_bytes + texts + (0 if self.log is None else self.log.num_bytes)

    def answer(self) -> dict[str, Any]:
        if self.snapshot is not None:
            self.snapshot()
        reason = {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None
        answer = {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created_at),
            "completed_at": None if self.completed_at is None else int(self.completed_at),
            "status": self.status,
            "error": self.error,
            "incomplete_details": reason,
            "output": self.output,
            "usage": self.usage,
            **self.head,
        }
        return answer if self.continuation is None else {**answer, "continuation": self.continuation}


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_owner: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}  # as counted, by id
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, response: StoredResponse) -> list[StoredResponse]:
        """Returns those that were evicted for it."""
        self._by_owner.setdefault(response.owner, OrderedDict())[response.id] = response
        self._sizes[response.id] = 0
        return self.settle(response)

    def settle(self, response: StoredResponse) -> list[StoredResponse]:
        """The response has grown, or ended. Returns those that were evicted, perhaps itself."""
        if response.id not in self._sizes:
            return []  # deleted
        size = response.num_bytes
        self._num_bytes += size - self._sizes[response.id]
        self._sizes[response.id] = size
        evicted = []
        while len(self) > self._max_responses or self._num_bytes > self._max_bytes:
            victim = self._next_victim(response)
            if victim is None:
                break
            self.remove(victim)
            evicted.append(victim)
        return evicted

    def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """None for an unknown id and for one of another owner."""
        own = self._by_owner.get(owner)
        found = None if own is None else own.get(response_id)
        if found is not None and own is not None:
            own.move_to_end(response_id)
        return found

    def items(self, owner: str | None) -> dict[str, Item]:
        """The items of all stored responses of this owner, by id."""
        return {
            item["id"]: item
            for response in self._by_owner.get(owner, {}).values()
            for item in (*response.input, *response.output)
        }

    def remove(self, response: StoredResponse) -> None:
        own = self._by_owner[response.owner]
        del own[response.id]
        if not own:
            del self._by_owner[response.owner]
        self._num_bytes -= self._sizes.pop(response.id)

    def _next_victim(self, newest: StoredResponse) -> StoredResponse | None:
        """The newest one itself only if there is no other."""
        by_size = sorted(self._by_owner.values(), key=len, reverse=True)
        return next((one for own in by_size for one in self._evictable(own) if one is not newest), None) or (
            None if newest.is_running else newest
        )

    @staticmethod
    def _evictable(own: OrderedDict[str, StoredResponse]) -> Iterator[StoredResponse]:
        return (response for response in own.values() if not response.is_running)
