"""GET /v1/engine/events: what the engines are doing, as a stream; DELETE /v1/engine/requests/{id} and /leases/{id}.

With API keys, a key is shown its own requests and may end them; an admin key is shown those of all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import context_of
from ratoon.api.server.engine_watch import View
from ratoon.api.server.errors import request_not_found
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.openapi import answers
from ratoon.api.server.protocol.base import AnswerModel
from ratoon.api.server.responses import EVENT_STREAM, EventStream, json_response

MIN_INTERVAL, MAX_INTERVAL = 0.1, 10.0  # seconds
MAX_COUNT = 10**9


class AbortedRequest(AnswerModel):
    id: str
    object: Literal["request.aborted"]
    aborted: Literal[True]


class EndedLease(AnswerModel):
    id: str
    object: Literal["lease.deleted"]
    deleted: Literal[True]


router = APIRouter(tags=["Engine"])


class EngineEvents(AnswerModel):
    """The data of an event: a snapshot has all fields, a delta what changed."""

    time: float = Field(description="Seconds since 1970")
    engines: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    leases: list[dict[str, Any]]
    steps: list[list[Any]]
    rates: dict[str, Any]


def _described() -> dict[int | str, dict[str, Any]]:
    an_event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    stream = {EVENT_STREAM: {"schema": an_event}}
    errors = {status: found for status, found in answers(EngineEvents, 400).items() if status != 200}
    return {200: {"content": stream, "description": "Server-sent events: snapshot, then delta"}, **errors}


@router.get(
    "/v1/engine/events",
    summary="What the engines are doing: a snapshot, then what changes",
    responses=_described(),
    response_class=Response,
)
async def engine_events(
    request: Request,
    interval: Annotated[
        float, Query(ge=MIN_INTERVAL, le=MAX_INTERVAL, description="Seconds between events, at least")
    ] = 0.25,
    count: Annotated[
        int | None, Query(ge=1, le=MAX_COUNT, description="End after so many events; default: never")
    ] = None,
) -> Response:
    events = context_of(request).watch.events(view_of(request), interval, count)
    return EventStream(b"", events, exchange_of(request.scope).headers(), end=b"")


@router.delete(
    "/v1/engine/requests/{request_id}",
    summary="Abort a request that has not ended",
    responses=answers(AbortedRequest, 404),
)
async def abort_request(request: Request, request_id: str) -> Response:
    view = view_of(request)
    for context in context_of(request).awake:
        found_id = await context.shared.resolve(request_id, view.owner)
        for name in dict.fromkeys((request_id, found_id)):
            if await context.shared.abort(name, view.owner, view.of_all):
                return json_response(request, {"id": name, "object": "request.aborted", "aborted": True})
    raise request_not_found(request_id, "request_id")


@router.delete(
    "/v1/engine/leases/{request_id}",
    summary="Free the memory that is kept for continuations of a request, which can still be continued",
    responses=answers(EndedLease, 404),
)
async def end_lease(request: Request, request_id: str) -> Response:
    view = view_of(request)
    for context in context_of(request).awake:
        found_id = await context.shared.resolve(request_id, view.owner)
        for name in dict.fromkeys((request_id, found_id)):
            if await context.llm.end_leases(name, view.owner, of_any_owner=view.of_all):
                return json_response(request, {"id": name, "object": "lease.deleted", "deleted": True})
    raise request_not_found(request_id, "request_id")


def view_of(request: Request) -> View:
    """What the sender of a request may see and end: everything without API keys, or with an admin key."""
    exchange = exchange_of(request.scope)
    return View(exchange.is_admin or not context_of(request).settings.api_keys, exchange.tenant)
