"""What the store of responses keeps of conversations: turns, each behind the one before it, and conversations that have
a name of their own and end with one of these turns.

Responses and conversations share turns. Which of them are kept, and for how long, is decided by the store
(response_store.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ratoon.api.server.response_items import NO_ITEMS, Item, StoredItems, store_items

# What Python's objects take beside what they hold.
TURN_BYTES = 512
CONVERSATION_BYTES = 1024


@dataclass(eq=False, slots=True)
class Turn:
    """One response's part of a conversation, after those before it. Responses that continue the same one share it."""

    before: Turn | None
    input: StoredItems
    output: StoredItems = NO_ITEMS  # until the response has ended
    num_holders: int = 0  # in the store: its response, conversations that end with it, and turns behind it
    num_counted_bytes: int = 0  # by the store, while it has holders
    number: int = 0  # in the log of the store; 0: it is not there

    @property
    def own_bytes(self) -> int:
        return TURN_BYTES + self.input.num_bytes + self.output.num_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of all turns up to this one."""
        return sum(turn.own_bytes for turn in turns_up_to(self))


def turns_up_to(turn: Turn | None) -> Iterator[Turn]:
    """Yields the turns, the newest first."""
    while turn is not None:
        yield turn
        turn = turn.before


def items_of(turn: Turn | None) -> list[Item]:
    """Returns the items of the whole conversation. It takes time as it is long: not for the event loop."""
    turns = list(turns_up_to(turn))
    return [item for turn in reversed(turns) for stored in (turn.input, turn.output) for item in stored]


@dataclass(eq=False, slots=True)
class StoredConversation:
    """A conversation with a name: clients add items to it, and responses what they were asked and have answered."""

    id: str
    owner: str | None
    turn: Turn | None = None  # the last one; None: it has no items
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time)
    # The response whose conversation is the beginning of this one, and whose tokens the next one goes on from
    response_id: str | None = None
    version: int = 0  # of its items

    @property
    def num_bytes(self) -> int:
        """The bytes that a conversation holds beside its turns."""
        return CONVERSATION_BYTES + sum(len(name) + len(value) for name, value in self.metadata.items())

    @property
    def num_bytes_of_turns(self) -> int:
        return 0 if self.turn is None else self.turn.num_bytes

    def answer(self) -> dict[str, Any]:
        about = {"id": self.id, "object": "conversation", "created_at": int(self.created_at)}
        return {**about, "metadata": self.metadata}


def turn_of_items(items: Iterable[Item]) -> Turn | None:
    """Returns one turn that has these items; None: there are none."""
    kept = list(items)
    return Turn(None, store_items(kept)) if kept else None
