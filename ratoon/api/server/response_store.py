"""Stored responses and conversations: what was asked, what was answered, and what the next turn continues.

Bounded in number and in bytes: the least recently used one of the owner that has most of them is evicted, and never
one that is being generated. Where those that are generated exceed the bytes by themselves, events are dropped, and then
the largest response in the background fails. What the store holds is kept encoded, and counted as such; a turn that
several responses or conversations continue is held, and counted, once. The tokens, and their memory, are the engine's
(engine/output/roots.py); a response has the same id there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ratoon.api.server.errors import ApiError
from ratoon.api.server.response_items import FoundItem, Item, find_items, store_items
from ratoon.api.server.stored_turns import StoredConversation, Turn, turns_up_to
from ratoon.api.server.threads import off_loop
from ratoon.api.server.transcripts import Transcript

QUEUED, IN_PROGRESS = "queued", "in_progress"
COMPLETED, INCOMPLETE, FAILED, CANCELLED = "completed", "incomplete", "failed", "cancelled"
CONTINUABLE = (COMPLETED, INCOMPLETE)


# What Python's objects take beside what they hold.
RESPONSE_BYTES = 2048
SEGMENT_BYTES = 256
EVENT_BYTES = 48

_encode = msgspec.json.Encoder().encode


class EventPage(msgspec.Struct, array_like=True, gc=False):
    """Events of a response, from the one that was asked for on."""

    events: bytes
    num_events: int
    num_dropped: int  # of the oldest, for lack of memory
    is_end: bool = False  # there are no more, and there will be none

    def check(self, start: int) -> None:
        """Raises ApiError if events from this number on were dropped."""
        if start < self.num_dropped:
            message = (
                f"The server has dropped the first {self.num_dropped} events of this response, for lack of memory "
                f"(--max-response-bytes); starting_after {self.num_dropped - 1} or more, or no stream"
            )
            raise ApiError(410, message, param="starting_after", code="events_dropped")


class Runner(Protocol):
    """The front end that generates a response, in another process."""

    async def answer(self, response: StoredResponse) -> list[bytes]:
        """The response with what it has so far, in parts. EngineError: the front end is gone."""
        ...

    def cancel(self, response: StoredResponse) -> None:
        """Ends the response soon."""


class EventLog:
    """The events of a response that runs in the background, encoded, by their sequence numbers. Any number of readers
    follow it, each at its own speed. Where there is no room for all of them, the oldest are dropped."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._ended = False
        self._changed = asyncio.Event()
        self.num_bytes = 0

    def append(self, events: list[bytes]) -> None:
        self._events += events
        self.num_bytes += sum(map(_event_bytes, events))
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def drop_older_half(self) -> None:
        target = self.num_bytes // 2
        count = 0
        while self.num_bytes > target:
            self.num_bytes -= _event_bytes(self._events[count])
            count += 1
        del self._events[:count]
        self._num_dropped += count

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_events(self) -> int:
        """All so far, with those that were dropped."""
        return self._num_dropped + len(self._events)

    async def page(self, start: int) -> EventPage:
        """Returns events from the one with this number on; waits if there is none yet."""
        while start >= self._num_dropped:
            first = start - self._num_dropped
            new = self._events[first : first + EVENTS_AT_ONCE]
            if new or self._ended:
                return EventPage(b"".join(new), len(new), self._num_dropped, is_end=not new)
            await self._changed.wait()
        return EventPage(b"", 0, self._num_dropped)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


EVENTS_AT_ONCE = 1024


def _event_bytes(event: bytes) -> int:
    return len(event) + EVENT_BYTES


@dataclass(eq=False, slots=True)
class StoredResponse:
    id: str
    owner: str | None
    head: bytes  # fields of the answer that do not change: the inside of a JSON object
    is_background: bool
    turn: Turn  # the conversation up to its end
    created_at: float = field(default_factory=time.time)
    completed_at: float | None = None
    status: str = QUEUED
    output: list[Item] = field(default_factory=list)  # while it is generated
    num_output_bytes: int = 0  # that this holds
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    continuation: dict[str, Any] | None = None
    prompt: Transcript = ()  # of its prompt; empty: it has not begun
    transcript: Transcript = ()  # of prompt and answer; empty until the next turn needs it
    snapshot: Callable[[], None] | None = None  # puts the output so far into `output`, while it is generated
    log: EventLog | None = None  # only of one that runs in the background and was asked to stream
    work: asyncio.Task[None] | None = None  # of one that runs in the background
    runner: Runner | None = None  # what generates it, where that is another process
    num_logged_tokens: int = 0  # of the answer, that the events in the log are about
    body: bytes = b""  # the request, while it runs in the background and another front end may have to go on with it
    num_events: int = 0  # that were logged before this front end went on with it
    previous_id: str | None = None  # of the response that it continues
    session: str | None = None  # that it ends in; None: its own, by its id
    conversation_id: str | None = None  # to which it is added when it has ended; None: to none, or it was added
    conversation_version: int = 0  # of the items that it continues
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.status in (QUEUED, IN_PROGRESS)

    @property
    def num_bytes(self) -> int:
        """The bytes that a response holds beside its turn."""
        num_segments = len(self.prompt) + len(self.transcript)
        log = 0 if self.log is None else self.log.num_bytes
        held = len(self.head) + len(self.body) + self.num_output_bytes
        return RESPONSE_BYTES + held + num_segments * SEGMENT_BYTES + log

    def close_output(self) -> None:
        """Notes that the output is complete."""
        self.turn.output = store_items(self.output)
        self.output, self.num_output_bytes = [], 0

    def answer(self) -> msgspec.Raw:
        """The response as JSON, for an answer that is not large."""
        before, after = self._around_output()
        return msgspec.Raw(b"".join([before, *self._output_encoder()(), after]))

    async def answer_parts(self) -> list[bytes]:
        """The response as JSON, in parts. What has ended is not copied, and what is large is encoded off the event
        loop, as it is now."""
        before, after = self._around_output()
        encode = self._output_encoder()
        output = await off_loop(self.num_output_bytes, encode) if self.is_running else encode()
        return [before, *output, after]

    def _output_encoder(self) -> Callable[[], list[bytes]]:
        """Returns what gives the inside of the output as it is now, in parts."""
        if not self.is_running:
            return self.turn.output.as_json
        if self.snapshot is not None:
            self.snapshot()
        output = list(self.output)
        return lambda: [_encode(output)[1:-1]]

    def _around_output(self) -> tuple[bytes, bytes]:
        """The parts of the answer before and behind the inside of its output."""
        reason = {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None
        before = {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created_at),
            "completed_at": None if self.completed_at is None else int(self.completed_at),
            "status": self.status,
            "error": self.error,
            "incomplete_details": reason,
        }
        after = {"usage": self.usage}
        if self.continuation is not None:
            after["continuation"] = self.continuation
        return b'%b,"output":[' % _encode(before)[:-1], b"],%b,%b}" % (_encode(after)[1:-1], self.head)


def encode_head(fields: dict[str, Any]) -> bytes:
    """Encodes the head of a response with these fields."""
    return _encode(fields)[1:-1]


class StoreLog(Protocol):
    """What responses outlive the process in."""

    def read(self) -> tuple[list[StoredResponse], list[StoredConversation]]:
        """Returns the responses and conversations of earlier processes, in the order in which they ended or were used
        last."""
        ...

    def ended(self, response: StoredResponse) -> None:
        """A response that is stored has ended. May be called again."""

    def changed(self, conversation: StoredConversation) -> None:
        """A conversation is new, or has other items or metadata than before."""

    def gone(self, stored_id: str) -> None:
        """A response or a conversation was deleted or evicted."""

    def tidy(self, responses: Iterable[StoredResponse], conversations: Iterable[StoredConversation]) -> None:
        """May forget what is not among these, which are all that are stored."""

    def close(self) -> None: ...


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int, log: StoreLog | None = None) -> None:
        self._log: StoreLog | None = None  # while responses are read from it, nothing is written to it
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_owner: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        self._conversations: dict[str | None, OrderedDict[str, StoredConversation]] = {}
        self._sizes: dict[str, int] = {}  # as counted, by id, without turns
        self._num_bytes = 0
        if log is not None:
            responses, conversations = log.read()
            for response in responses:
                self.add(response)
            for conversation in conversations:
                self.add_conversation(conversation)
            self._log = log

    def close(self) -> None:
        """Another process may have the log now."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[StoredResponse]:
        return (response for own in list(self._by_owner.values()) for response in list(own.values()))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, response: StoredResponse) -> list[StoredResponse]:
        """Adds a response. Returns those that were evicted for it."""
        self._by_owner.setdefault(response.owner, OrderedDict())[response.id] = response
        self._sizes[response.id] = 0
        self._hold(response.turn)
        return self.settle(response)

    def settle(self, response: StoredResponse) -> list[StoredResponse]:
        """Notes that a response has grown, or ended. Returns those that were evicted, perhaps itself."""
        if response.id not in self._sizes:
            return []  # deleted
        self._count(response)
        if self._log is not None and not response.is_running:
            self._log.ended(response)
        if not response.is_running:
            self._add_to_conversation(response)
        return self._make_room(response)

    def _make_room(self, newest: StoredResponse | StoredConversation) -> list[StoredResponse]:
        """Evicts what is too much, the newest last. Returns the responses that were evicted."""
        evicted = []
        while len(self) > self._max_responses or self._num_bytes > self._max_bytes:
            is_too_large = self._num_bytes > self._max_bytes
            victim = next(self._victims(newest, with_conversations=is_too_large), None)
            if victim is None:
                break
            if isinstance(victim, StoredConversation):
                self.remove_conversation(victim)
            else:
                self.remove(victim)
                evicted.append(victim)
        if self._num_bytes > self._max_bytes:
            self._shorten_logs()
        return evicted

    def next_too_large(self) -> StoredResponse | None:
        """Returns a response in the background that must end, because what is generated exceeds the limit by itself:
        the largest one of the owner whose responses hold most. Those that have an error are about to end. None: there
        is room, or no response to end."""
        if self._num_bytes <= self._max_bytes:
            return None
        running = [one for one in self if one.is_running and one.is_background and one.num_output_bytes]
        ending = sum(one.num_output_bytes for one in running if one.error is not None)
        if self._num_bytes - ending <= self._max_bytes:
            return None
        held: Counter[str | None] = Counter()
        for one in running:
            held[one.owner] += one.num_output_bytes
        going_on = (one for one in running if one.error is None)
        return max(going_on, key=lambda one: (held[one.owner], one.num_output_bytes), default=None)

    def _count(self, response: StoredResponse) -> None:
        size, turn = response.num_bytes, response.turn
        self._num_bytes += size - self._sizes[response.id] + turn.own_bytes - turn.num_counted_bytes
        self._sizes[response.id] = size
        turn.num_counted_bytes = turn.own_bytes

    def _hold(self, turn: Turn | None) -> None:
        for one in turns_up_to(turn):
            one.num_holders += 1
            if one.num_holders > 1:
                break
            one.num_counted_bytes = one.own_bytes
            self._num_bytes += one.num_counted_bytes

    def _let_go(self, turn: Turn | None) -> None:
        for one in turns_up_to(turn):
            one.num_holders -= 1
            if one.num_holders:
                break
            self._num_bytes -= one.num_counted_bytes
            one.num_counted_bytes = 0

    def _shorten_logs(self) -> None:
        """Shortens logs where all that is left is being generated: the largest logs lose their older halves."""
        logged = [one for own in self._by_owner.values() for one in own.values() if one.log is not None]
        for response in sorted(logged, key=_log_bytes, reverse=True):
            if self._num_bytes <= self._max_bytes or _log_bytes(response) <= LEAST_LOG_BYTES:
                break
            assert response.log is not None
            response.log.drop_older_half()
            self._count(response)

    def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Returns a response; None for an unknown id and for one of another owner."""
        own = self._by_owner.get(owner)
        found = None if own is None else own.get(response_id)
        if found is not None and own is not None:
            own.move_to_end(response_id)
        return found

    def finder(self, owner: str | None) -> Callable[[Iterable[str]], dict[str, FoundItem]]:
        """Returns a function that finds items of this owner's stored responses and conversations by id, for another
        thread. Of several with the same id, that of the response that was used last."""
        turns = [response.turn for response in reversed(self._by_owner.get(owner, {}).values())]
        for conversation in reversed(self._conversations.get(owner, {}).values()):
            turns += turns_up_to(conversation.turn)
        stored = [items for turn in turns for items in (turn.input, turn.output)]
        return lambda ids: find_items(ids, stored)

    def remove(self, response: StoredResponse) -> None:
        own = self._by_owner[response.owner]
        del own[response.id]
        if not own:
            del self._by_owner[response.owner]
        self._num_bytes -= self._sizes.pop(response.id)
        self._let_go(response.turn)
        self._note_gone(response.id)

    def _note_gone(self, stored_id: str) -> None:
        if self._log is not None:
            self._log.gone(stored_id)
            self._log.tidy(self, self.conversations())

    def _victims(
        self, newest: StoredResponse | StoredConversation, with_conversations: bool
    ) -> Iterator[StoredResponse | StoredConversation]:
        """Yields what may be evicted, of the owner that has most first, and the newest only if there is no other."""
        owners = {*self._by_owner, *self._conversations}
        for owner in sorted(owners, key=self._num_of, reverse=True):
            yield from (one for one in self._evictable(self._by_owner.get(owner)) if one is not newest)
            if with_conversations:
                yield from (one for one in self._conversations.get(owner, {}).values() if one is not newest)
        if isinstance(newest, StoredConversation):
            if with_conversations and newest.id in self._conversations.get(newest.owner, ()):
                yield newest
        elif not newest.is_running:
            yield newest

    def _num_of(self, owner: str | None) -> int:
        """The number of responses and conversations that an owner has."""
        return len(self._by_owner.get(owner, ())) + len(self._conversations.get(owner, ()))

    @staticmethod
    def _evictable(own: OrderedDict[str, StoredResponse] | None) -> Iterator[StoredResponse]:
        return (response for response in (own or {}).values() if not response.is_running)

    # ---- conversations ----

    def conversations(self) -> Iterator[StoredConversation]:
        return (one for own in list(self._conversations.values()) for one in list(own.values()))

    def add_conversation(self, conversation: StoredConversation) -> list[StoredResponse]:
        """Adds a conversation, and evicts the least recently used one of the owner that has most if there are too many.
        Returns the responses that were evicted for it."""
        self._conversations.setdefault(conversation.owner, OrderedDict())[conversation.id] = conversation
        self._num_bytes += conversation.num_bytes
        self._hold(conversation.turn)
        if self._log is not None:
            self._log.changed(conversation)
        while sum(map(len, self._conversations.values())) > self._max_responses:
            most = max(self._conversations.values(), key=len)
            self.remove_conversation(next(iter(most.values())))
        return self._make_room(conversation)

    def find_conversation(self, conversation_id: str, owner: str | None) -> StoredConversation | None:
        """Returns a conversation; None for an unknown id and for one of another owner."""
        own = self._conversations.get(owner)
        found = None if own is None else own.get(conversation_id)
        if found is not None and own is not None:
            own.move_to_end(conversation_id)
        return found

    def change_conversation(
        self, conversation: StoredConversation, turn: Turn | None, response_id: str | None
    ) -> list[StoredResponse]:
        """Lets a conversation end with this turn, which a response has made or not. Returns what was evicted for it."""
        self._hold(turn)
        self._let_go(conversation.turn)
        conversation.turn, conversation.response_id = turn, response_id
        conversation.version += 1
        if self._log is not None:
            self._log.changed(conversation)
            self._log.tidy(self, self.conversations())
        return self._make_room(conversation)

    def set_metadata(self, conversation: StoredConversation, metadata: dict[str, str]) -> list[StoredResponse]:
        self._num_bytes -= conversation.num_bytes
        conversation.metadata = metadata
        self._num_bytes += conversation.num_bytes
        if self._log is not None:
            self._log.changed(conversation)
            self._log.tidy(self, self.conversations())
        return self._make_room(conversation)

    def remove_conversation(self, conversation: StoredConversation) -> None:
        """Removes a conversation. Its responses stay."""
        own = self._conversations[conversation.owner]
        del own[conversation.id]
        if not own:
            del self._conversations[conversation.owner]
        self._num_bytes -= conversation.num_bytes
        self._let_go(conversation.turn)
        self._note_gone(conversation.id)

    def _add_to_conversation(self, response: StoredResponse) -> None:
        """Adds what a response was asked and has answered to its conversation, once, unless it failed. Where others
        were added meanwhile it comes behind them, and the next one can't go on from its tokens."""
        conversation_id, response.conversation_id = response.conversation_id, None
        if conversation_id is None or response.status not in CONTINUABLE:
            return
        conversation = self.find_conversation(conversation_id, response.owner)
        if conversation is None:
            return  # deleted meanwhile
        turn = response.turn
        if conversation.turn is turn.before:
            self.change_conversation(conversation, turn, response.id)
        else:
            self.change_conversation(conversation, Turn(conversation.turn, turn.input, turn.output), None)


LEAST_LOG_BYTES = 64 * 1024  # of a log that is not shortened further


def _log_bytes(response: StoredResponse) -> int:
    return 0 if response.log is None else response.log.num_bytes
