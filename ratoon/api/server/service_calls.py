"""The calls between a front end and the service's process, and what travels with them: data only."""

from __future__ import annotations

from typing import Any

import msgspec

from ratoon.api.server.response_items import NO_ITEMS, StoredItems
from ratoon.api.server.response_store import EventPage, StoredResponse
from ratoon.api.server.settings import ServerSettings
from ratoon.api.server.stored_turns import StoredConversation, Turn, turns_up_to
from ratoon.api.server.transcripts import Segment
from ratoon.core.adapters import Adapter
from ratoon.core.messages import Fault
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.processes.hub_client import FRONT_END_METHODS, HUB_METHODS
from ratoon.engine.processes.link import Method, Methods
from ratoon.observe.metrics import MetricsFigures


class FrontEndLaunch(msgspec.Struct):
    """The parameters of a front end's process, read from its standard input at start."""

    model: str
    llm_settings: dict[str, Any]
    settings: ServerSettings
    index: int
    service_pid: int


class ResponseRecord(msgspec.Struct, array_like=True, omit_defaults=True):
    """The part of a running response that does not change."""

    id: str
    owner: str | None
    head: bytes
    is_background: bool
    created_at: float
    input: StoredItems
    previous_id: str | None = None
    session: str | None = None
    is_logged: bool = False
    body: bytes = b""
    num_events: int = 0  # logged so far
    num_logged_tokens: int = 0
    conversation_id: str | None = None
    conversation_version: int = 0


class ResponseProgress(msgspec.Struct, array_like=True, omit_defaults=True):
    """The part of a running response that changes."""

    status: str
    num_output_bytes: int = 0
    completed_at: float | None = None
    output: StoredItems = NO_ITEMS
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    continuation: dict[str, Any] | None = None
    prompt: tuple[Segment, ...] = ()


class Conversation(msgspec.Struct, array_like=True):
    """Turns, the oldest first: what was asked, and what was answered."""

    turns: list[tuple[StoredItems, StoredItems]]


class NamedConversation(msgspec.Struct, array_like=True):
    """A StoredConversation."""

    id: str
    owner: str | None
    metadata: dict[str, str]
    created_at: float
    response_id: str | None
    version: int
    turns: Conversation


class EndedResponse(msgspec.Struct, array_like=True):
    record: ResponseRecord
    progress: ResponseProgress
    before: Conversation


Id = str
Owner = str | None
SERVICE = Methods(
    HUB_METHODS
    | {
        "started": Method((str,)),  # the model's name
        "start_failed": Method((Fault,)),
        "take_places": Method((Owner, int), str | None),
        "give_places_back": Method((Owner, int)),
        "num_unfinished": Method((), int),
        "note_name": Method((Owner, str, Id)),
        "resolve": Method((str, Owner), Id),
        "note_metrics": Method((MetricsFigures,)),
        "collect_metrics": Method((), list[MetricsFigures]),
        "add_response": Method((ResponseRecord, ResponseProgress)),
        "settle_response": Method((Id, Owner, ResponseProgress)),
        "log_events": Method((Id, Owner, list[bytes], int)),
        "end_log": Method((Id, Owner)),
        "find_ended_response": Method((Id, Owner), EndedResponse | None),
        "find_items": Method((list[str], Owner), dict[str, tuple[dict[str, Any], int]]),
        "answer_of_response": Method((Id, Owner), list[bytes] | None),
        "conversation_of_response": Method((Id, Owner), Conversation | None),
        "num_dropped_events": Method((Id, Owner), int | None),
        "read_events": Method((Id, Owner, int), EventPage | None),
        "cancel_response": Method((Id, Owner), list[bytes] | None),
        "delete_response": Method((Id, Owner), bool),
        "add_conversation": Method((NamedConversation,)),
        "find_conversation": Method((Id, Owner), NamedConversation | None),
        "set_metadata": Method((Id, Owner, dict[str, str]), NamedConversation | None),
        "add_items": Method((Id, Owner, StoredItems), NamedConversation | None),
        "remove_item": Method((Id, Owner, str), tuple[NamedConversation, bool] | None),
        "delete_conversation": Method((Id, Owner), bool),
        "join_adapters": Method((dict[str, Adapter],), dict[str, Adapter]),
        "add_adapter": Method((str, Adapter, bool)),
        "remove_adapter": Method((str,)),
    }
)
FRONT_END = Methods(
    FRONT_END_METHODS
    | {
        "drain": Method(),
        "metrics": Method((), MetricsFigures),
        "answer_of_run": Method((Id, Owner), list[bytes]),
        "cancel_run": Method((Id, Owner, dict[str, str] | None)),  # an error: the response ends as failed
        "go_on_with_response": Method((ResponseRecord, EngineCoreRequest | None)),
        "note_adapters": Method((dict[str, Adapter],)),
    }
)


def record_of(response: StoredResponse, is_logged: bool) -> ResponseRecord:
    return ResponseRecord(
        id=response.id,
        owner=response.owner,
        head=response.head,
        is_background=response.is_background,
        created_at=response.created_at,
        input=response.turn.input,
        previous_id=response.previous_id,
        session=response.session,
        is_logged=is_logged,
        body=response.body,
        num_events=0 if response.log is None else response.log.num_events,
        num_logged_tokens=response.num_logged_tokens,
        conversation_id=response.conversation_id,
        conversation_version=response.conversation_version,
    )


def progress_of(response: StoredResponse) -> ResponseProgress:
    return ResponseProgress(
        status=response.status,
        num_output_bytes=response.num_output_bytes,
        completed_at=response.completed_at,
        output=response.turn.output,
        usage=response.usage,
        error=response.error,
        continuation=response.continuation,
        prompt=tuple(response.prompt),
    )


def note_progress(response: StoredResponse, progress: ResponseProgress) -> None:
    response.status = progress.status
    response.num_output_bytes = progress.num_output_bytes
    response.completed_at = progress.completed_at
    response.turn.output = progress.output
    response.usage = progress.usage
    response.error = progress.error
    response.continuation = progress.continuation
    response.prompt = progress.prompt
    if not response.is_running:
        response.body = b""


def stored(record: ResponseRecord, progress: ResponseProgress, before: Turn | None) -> StoredResponse:
    """The response of a record, in another process."""
    response = StoredResponse(
        id=record.id,
        owner=record.owner,
        head=record.head,
        is_background=record.is_background,
        turn=Turn(before, record.input),
        created_at=record.created_at,
        body=record.body,
        previous_id=record.previous_id,
        session=record.session,
        num_logged_tokens=record.num_logged_tokens,
        num_events=record.num_events,
        conversation_id=record.conversation_id,
        conversation_version=record.conversation_version,
    )
    note_progress(response, progress)
    return response


def conversation_up_to(turn: Turn | None) -> Conversation:
    turns = [(one.input, one.output) for one in turns_up_to(turn)]
    return Conversation(turns[::-1])


def turn_of(conversation: Conversation) -> Turn | None:
    turn: Turn | None = None
    for asked, answered in conversation.turns:
        turn = Turn(turn, asked, answered)
    return turn


def named_conversation(found: StoredConversation) -> NamedConversation:
    return NamedConversation(
        found.id, found.owner, found.metadata, found.created_at, found.response_id, found.version,
        conversation_up_to(found.turn),
    )  # fmt: skip


def stored_conversation(named: NamedConversation) -> StoredConversation:
    return StoredConversation(
        named.id, named.owner, turn_of(named.turns), named.metadata, named.created_at, named.response_id, named.version
    )
