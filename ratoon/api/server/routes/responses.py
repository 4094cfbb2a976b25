"""/v1/responses: create, retrieve, delete and cancel a response, and list its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import ApiError, refused
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import off_loop
from ratoon.api.server.protocol.responses import (
    DeletedResponse,
    InputItems,
    ResponseAnswer,
    ResponseEvent,
    ResponsesRequest,
)
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.response_directory import check_events, follow_events
from ratoon.api.server.response_events import typed_event
from ratoon.api.server.response_items import Item
from ratoon.api.server.response_runs import ResponseRun, make_run, named_as_in_body, response_not_found
from ratoon.api.server.responses import EventStream, json_response, parts_response
from ratoon.api.server.stored_turns import Turn, items_of
from ratoon.api.server.typed_answers import answer_typed_stream, run_to_end
from ratoon.core.errors import RequestError

router = APIRouter(tags=["OpenAI"])
T = TypeVar("T")
EXAMPLE = {"model": MODEL, "input": "What is the capital of Japan?", "max_output_tokens": 32, "temperature": 0}


@router.post(
    "/v1/responses",
    summary="Answer a conversation, and keep it for the next turn",
    responses=answers(ResponseAnswer, *WITH_BODY, 404, 409, 429, stream_of=ResponseEvent),
    openapi_extra=body(ResponsesRequest, EXAMPLE),
)
async def create_response(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    try:
        run = await _prepare(request)
        exchange.notes = run.notes
        if run.response.is_background:
            async with context.admit(1, exchange.tenant):  # 429 now, and not as a response that failed
                await run.start()
            if run.is_streamed:
                return _stream_log(request, run.response.id, 0)
            return json_response(request, run.response.answer())
        if run.is_streamed:
            return await answer_typed_stream(request, run, _error_event)
        return await _answer_whole(request, run)
    except RequestError as error:
        raise named_as_in_body(error) from None


async def _prepare(request: Request) -> ResponseRun:
    """The function returns the run alone, so that the rest of the body is freed: the run may last for long."""
    context, exchange = context_of(request), exchange_of(request.scope)
    async with context.preparation.place(exchange.tenant, exchange.body_size) as place:
        return await make_run(context, await read_body(request, ResponsesRequest), exchange, place)


async def _answer_whole(request: Request, run: ResponseRun) -> Response:
    await run_to_end(run)
    if run.failure is not None:
        raise run.failure
    return parts_response(request, await run.response.answer_parts())


def _stream_log(request: Request, response_id: str, first_event: int) -> Response:
    exchange = exchange_of(request.scope)
    events = follow_events(context_of(request).shared.responses, response_id, exchange.tenant, first_event)
    return EventStream(b"", events, exchange.headers(), end=b"", error_event=_error_event)


def _error_event(error: ApiError) -> bytes:
    return typed_event("error", {"code": error.code, "message": error.message, "param": error.param})


@router.get(
    "/v1/responses/{response_id}",
    summary="Retrieve a response, finished or not",
    responses=answers(ResponseAnswer, 400, 404, 410, stream_of=ResponseEvent),
)
async def get_response(
    request: Request,
    response_id: str,
    stream: Annotated[bool, Query(description="Follow one that runs in the background and is streamed")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="Events after this sequence number")] = None,
) -> Response:
    responses, owner = context_of(request).shared.responses, exchange_of(request.scope).tenant
    answer = _found(await responses.answer(response_id, owner), response_id)
    if not stream:
        if starting_after is not None:
            raise refused("starting_after", "has no meaning without stream", "set stream to true, or leave it out")
        return parts_response(request, answer)
    first_event = 0 if starting_after is None else starting_after + 1
    check_events(await responses.num_dropped_events(response_id, owner), first_event)
    return _stream_log(request, response_id, first_event)


@router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response, and free the memory that was kept for the next turn",
    responses=answers(DeletedResponse, 404),
)
async def delete_response(request: Request, response_id: str) -> Response:
    owner = exchange_of(request.scope).tenant
    if not await context_of(request).shared.responses.delete(response_id, owner):
        raise response_not_found(response_id, "response_id")
    return json_response(request, {"id": response_id, "object": "response", "deleted": True})


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response that runs in the background",
    responses=answers(ResponseAnswer, 400, 404, 408, 413),
)
async def cancel_response(request: Request, response_id: str) -> Response:
    owner = exchange_of(request.scope).tenant
    answer = await context_of(request).shared.responses.cancel(response_id, owner)
    return parts_response(request, _found(answer, response_id))


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the items that a response answers, those of earlier responses included",
    responses=answers(InputItems, 400, 404),
)
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest first")] = "desc",
    after: Annotated[str | None, Query(description="Only items after the one with this id")] = None,
) -> Response:
    owner = exchange_of(request.scope).tenant
    turn = _found(await context_of(request).shared.responses.turn(response_id, owner), response_id)
    page = await off_loop(turn.num_bytes, lambda: _encode_page(turn, limit, order == "desc", after))
    return json_response(request, page)


def _encode_page(turn: Turn, limit: int, newest_first: bool, after: str | None) -> msgspec.Raw:
    return encode_page([*items_of(turn.before), *turn.input], limit, newest_first, after, "response")


def encode_page(items: list[Item], limit: int, newest_first: bool, after: str | None, whole: str) -> msgspec.Raw:
    """Encodes a part of the items of a response or a conversation, which `whole` names."""
    if newest_first:
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise refused("after", f"is no item of this {whole}", "the last_id of the list before")
        items = items[ids.index(after) + 1 :]
    shown = items[:limit]
    listed: dict[str, Any] = {"object": "list", "data": shown, "has_more": len(items) > limit}
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return msgspec.Raw(msgspec.json.encode({**listed, **ends}))


def _found(found: T | None, response_id: str) -> T:
    if found is None:
        raise response_not_found(response_id, "response_id")
    return found
