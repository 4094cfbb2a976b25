"""Stored responses that outlive the process: a log of what has ended, from which the next process reads them.

A turn is written once, with the number of the one before it, so that a long conversation is not written again with each
of its responses. What runs in the background is written when it has ended, without its events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ratoon.api.server.response_items import StoredItems
from ratoon.api.server.response_store import StoredResponse, Turn, turns_up_to
from ratoon.api.server.transcripts import Transcript
from ratoon.core.wire import Decoder, WireError, encode
from ratoon.engine.output.record_log import RecordLog

SPARE_RECORDS = 1000  # of what is gone, and as many as there are responses: with more, the log is written anew


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


class GoneRecord(msgspec.Struct, tag="gone"):
    id: str


class ResponseLog:
    """Implements StoreLog over a file."""

    def __init__(self, records: RecordLog) -> None:
        self._records = records
        self._decoder: Decoder[Any] = Decoder(TurnRecord | EndedRecord | GoneRecord)  # type: ignore[arg-type]
        self._num_records = 0
        self._num_turns = 0
        self._written: set[str] = set()  # the ids of responses

    def read(self) -> list[StoredResponse]:
        turns: dict[int, Turn] = {}
        found: dict[str, StoredResponse] = {}
        for frames in self._records.read():
            try:
                record = self._decoder.decode(frames)
            except WireError:  # of another version
                continue
            if isinstance(record, TurnRecord):
                turns[record.number] = Turn(turns.get(record.before), record.input, record.output)
            elif isinstance(record, GoneRecord):
                found.pop(record.id, None)
            elif record.turn in turns:
                found[record.id] = _restored(record, turns[record.turn])
        self._write_anew(found.values())
        return list(found.values())

    def ended(self, response: StoredResponse) -> None:
        if response.id not in self._written:
            for record in self._records_of(response):
                self._append(record)

    def gone(self, response: StoredResponse, left: Iterable[StoredResponse], num_left: int) -> None:
        if response.id not in self._written:
            return
        self._written.discard(response.id)
        self._append(GoneRecord(response.id))
        if self._num_records > 3 * num_left + SPARE_RECORDS:  # two for each response, its turn and itself
            self._write_anew(one for one in left if one.id in self._written)

    def _records_of(self, response: StoredResponse) -> list[TurnRecord | EndedRecord]:
        """The response, and behind those before it the turns that were not written yet."""
        new: list[TurnRecord | EndedRecord] = []
        missing = []
        for turn in turns_up_to(response.turn):
            if turn.number:
                break
            missing.append(turn)
        for turn in reversed(missing):
            self._num_turns += 1
            turn.number = self._num_turns
            before = 0 if turn.before is None else turn.before.number
            new.append(TurnRecord(turn.number, before, turn.input, turn.output))
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

    def _append(self, record: TurnRecord | EndedRecord | GoneRecord) -> None:
        self._num_records += 1
        self._records.append(encode(record))

    def _write_anew(self, responses: Iterable[StoredResponse]) -> None:
        kept = list(responses)
        for response in kept:
            for turn in turns_up_to(response.turn):
                turn.number = 0
        self._num_turns = 0
        self._written = set()
        records = [record for response in kept for record in self._records_of(response)]
        self._records.replace(map(encode, records))
        self._num_records = len(records)

    def close(self) -> None:
        self._records.close()


def _restored(record: EndedRecord, turn: Turn) -> StoredResponse:
    response = StoredResponse(
        record.id, record.owner, record.head, record.is_background, turn,
        created_at=record.created_at, completed_at=record.completed_at, status=record.status, usage=record.usage,
        error=record.error, continuation=record.continuation, prompt=record.prompt, transcript=record.transcript,
        previous_id=record.previous_id, session=record.session,
    )  # fmt: skip
    response.ended.set()
    return response
