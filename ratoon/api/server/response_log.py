"""Stored responses and conversations that outlive the process: a log of what has ended or was added, from which the
next process reads them.

A turn is written once, with the number of the one before it, so that a long conversation is not written again with each
of its responses. What runs in the background is written when it has ended, without its events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ratoon.api.server.response_items import StoredItems
from ratoon.api.server.response_store import StoredResponse
from ratoon.api.server.stored_turns import StoredConversation, Turn, turns_up_to
from ratoon.api.server.transcripts import Transcript
from ratoon.core.wire import Decoder, WireError, encode
from ratoon.engine.output.record_log import RecordLog

SPARE_RECORDS = 1000  # beside twice as many turns as were kept last: with more, the log is written anew


class TurnRecord(msgspec.Struct, tag="turn"):
    number: int
    before: int  # 0: it is the first
    input: StoredItems
    output: StoredItems


class EndedRecord(msgspec.Struct, tag="response"):
    """A StoredResponse that has ended."""

    id: str
    owner: str | None
    turn: int
    head: bytes
    is_background: bool
    created_at: float
    completed_at: float | None
    status: str
    usage: dict[str, Any] | None
    error: dict[str, str] | None
    continuation: dict[str, Any] | None
    prompt: Transcript
    transcript: Transcript
    previous_id: str | None
    session: str | None = None


class ConversationRecord(msgspec.Struct, tag="conversation"):
    """A StoredConversation as it is now, in the place of earlier records of it."""

    id: str
    owner: str | None
    turn: int  # 0: it has no items
    metadata: dict[str, str]
    created_at: float
    response_id: str | None
    version: int


class GoneRecord(msgspec.Struct, tag="gone"):
    id: str


Written = TurnRecord | EndedRecord | ConversationRecord | GoneRecord


class ResponseLog:
    """Implements StoreLog over a file."""

    def __init__(self, records: RecordLog) -> None:
        self._records = records
        self._decoder: Decoder[Any] = Decoder(Written)  # type: ignore[arg-type]
        self._num_records = 0
        self._num_turns = 0
        self._num_turns_kept = 0  # when the log was last written anew
        self._written: set[str] = set()  # the ids of responses and conversations

    def read(self) -> tuple[list[StoredResponse], list[StoredConversation]]:
        turns: dict[int, Turn] = {}
        found: dict[str, StoredResponse] = {}
        conversations: dict[str, StoredConversation] = {}
        for frames in self._records.read():
            try:
                record = self._decoder.decode(frames)
            except WireError:  # of another version
                continue
            if isinstance(record, TurnRecord):
                turns[record.number] = Turn(turns.get(record.before), record.input, record.output)
            elif isinstance(record, GoneRecord):
                found.pop(record.id, None)
                conversations.pop(record.id, None)
            elif isinstance(record, ConversationRecord):
                if record.turn in turns or not record.turn:
                    conversations.pop(record.id, None)  # the last one that was used is the last
                    conversations[record.id] = _restored_conversation(record, turns.get(record.turn))
            elif record.turn in turns:
                found[record.id] = _restored(record, turns[record.turn])
        self._write_anew(found.values(), conversations.values())
        return list(found.values()), list(conversations.values())

    def ended(self, response: StoredResponse) -> None:
        if response.id not in self._written:
            for record in self._records_of(response):
                self._append(record)

    def changed(self, conversation: StoredConversation) -> None:
        for record in self._records_of_conversation(conversation):
            self._append(record)

    def gone(self, stored_id: str) -> None:
        if stored_id in self._written:
            self._written.discard(stored_id)
            self._append(GoneRecord(stored_id))

    def tidy(self, responses: Iterable[StoredResponse], conversations: Iterable[StoredConversation]) -> None:
        if self._num_records > len(self._written) + 2 * self._num_turns_kept + SPARE_RECORDS:
            self._write_anew((one for one in responses if one.id in self._written), conversations)

    def _records_of(self, response: StoredResponse) -> list[Written]:
        """The response, and behind those before it the turns that were not written yet."""
        new = self._records_of_turns(response.turn)
        new.append(
            EndedRecord(
                response.id, response.owner, response.turn.number, response.head, response.is_background,
                response.created_at, response.completed_at, response.status, response.usage, response.error,
                response.continuation, response.prompt, response.transcript, response.previous_id,
                response.session,
            )
        )  # fmt: skip
        self._written.add(response.id)
        return new

    def _records_of_conversation(self, conversation: StoredConversation) -> list[Written]:
        new = self._records_of_turns(conversation.turn)
        number = 0 if conversation.turn is None else conversation.turn.number
        new.append(
            ConversationRecord(
                conversation.id, conversation.owner, number, conversation.metadata, conversation.created_at,
                conversation.response_id, conversation.version,
            )
        )  # fmt: skip
        self._written.add(conversation.id)
        return new

    def _records_of_turns(self, last: Turn | None) -> list[Written]:
        """The turns up to this one that were not written yet."""
        new: list[Written] = []
        missing = []
        for turn in turns_up_to(last):
            if turn.number:
                break
            missing.append(turn)
        for turn in reversed(missing):
            self._num_turns += 1
            turn.number = self._num_turns
            before = 0 if turn.before is None else turn.before.number
            new.append(TurnRecord(turn.number, before, turn.input, turn.output))
        return new

    def _append(self, record: Written) -> None:
        self._num_records += 1
        self._records.append(encode(record))

    def _write_anew(self, responses: Iterable[StoredResponse], conversations: Iterable[StoredConversation]) -> None:
        kept, named = list(responses), list(conversations)
        for turn in [*(one.turn for one in kept), *(one.turn for one in named)]:
            for one in turns_up_to(turn):
                one.number = 0
        self._num_turns = 0
        self._written = set()
        records = [record for response in kept for record in self._records_of(response)]
        records += [record for one in named for record in self._records_of_conversation(one)]
        self._records.replace(map(encode, records))
        self._num_records = len(records)
        self._num_turns_kept = self._num_turns

    def close(self) -> None:
        self._records.close()


def _restored_conversation(record: ConversationRecord, turn: Turn | None) -> StoredConversation:
    return StoredConversation(
        record.id, record.owner, turn, record.metadata, record.created_at, record.response_id, record.version
    )


def _restored(record: EndedRecord, turn: Turn) -> StoredResponse:
    response = StoredResponse(
        record.id, record.owner, record.head, record.is_background, turn,
        created_at=record.created_at, completed_at=record.completed_at, status=record.status, usage=record.usage,
        error=record.error, continuation=record.continuation, prompt=record.prompt, transcript=record.transcript,
        previous_id=record.previous_id, session=record.session,
    )  # fmt: skip
    response.ended.set()
    return response
