"""/v1/responses: create, retrieve, delete and cancel a response, and list its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
from ratoon.api.server.response_events import typed_event
from ratoon.api.server.response_runs import ResponseRun, forget_roots, make_run, named_as_in_body, response_not_found
from ratoon.api.server.response_store import EventLog, StoredResponse, Turn, items_of
from ratoon.api.server.responses import EventStream, json_response
from ratoon.api.server.typed_answers import answer_typed_stream, run_to_end
from ratoon.core.errors import RequestError

router = APIRouter(tags=["OpenAI"])
EXAMPLE = {"model": MODEL, "input": "What is the capital of Japan?", "max_output_tokens": 32, "temperature": 0}


@router.post(
    "/v1/responses",
    summary="Answer a conversation, and keep it for the next turn",
    responses=answers(ResponseAnswer, *WITH_BODY, 404, 429, stream_of=ResponseEvent),
    openapi_extra=body(ResponsesRequest, EXAMPLE),
)
async def create_response(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    try:
        run = await _prepare(request)
        exchange.notes = run.notes
        if run.response.is_background:
            with context.admit(1, exchange.tenant):  # 429 now, and not as a response that failed
                run.start()
            log = run.response.log
            return json_response(request, run.response.answer()) if log is None else _stream_log(request, log, 0)
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
    return json_response(request, run.response.answer())


def _stream_log(request: Request, log: EventLog, first_event: int) -> Response:
    headers = exchange_of(request.scope).headers()
    return EventStream(b"", log.read(first_event), headers, end=b"", error_event=_error_event)


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
    found = _find(request, response_id)
    if not stream:
        if starting_after is not None:
            raise refused("starting_after", "has no meaning without stream", "set stream to true, or leave it out")
        return json_response(request, found.answer())
    if found.log is None:
        problem = "the response was not created with background and stream"
        raise refused("stream", problem, "leave it out")
    first_event = 0 if starting_after is None else starting_after + 1
    found.log.check(first_event)
    return _stream_log(request, found.log, first_event)


@router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response, and free the memory that was kept for the next turn",
    responses=answers(DeletedResponse, 404),
)
async def delete_response(request: Request, response_id: str) -> Response:
    context, found = context_of(request), _find(request, response_id)
    await _cancel(found)
    if context.responses.find(response_id, found.owner) is found:  # not deleted meanwhile
        context.responses.remove(found)
        forget_roots(context, [found])
    return json_response(request, {"id": response_id, "object": "response", "deleted": True})


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response that runs in the background",
    responses=answers(ResponseAnswer, 400, 404, 408, 413),
)
async def cancel_response(request: Request, response_id: str) -> Response:
    found = _find(request, response_id)
    if not found.is_background:
        raise refused("response_id", "the response does not run in the background", "close its connection instead")
    await _cancel(found)
    return json_response(request, found.answer())


async def _cancel(response: StoredResponse) -> None:
    """Cancels a response, without effect on one that has ended. One that a client waits for ends with its
    connection."""
    if response.work is not None:
        response.work.cancel()
        await response.ended.wait()


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
    turn = _find(request, response_id).turn
    page = await off_loop(turn.num_bytes, lambda: _encode_page(turn, limit, order == "desc", after))
    return json_response(request, page)


def _encode_page(turn: Turn, limit: int, newest_first: bool, after: str | None) -> msgspec.Raw:
    items = [*items_of(turn.before), *turn.input]
    if newest_first:
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise refused("after", "is no item of this response", "the last_id of the list before")
        items = items[ids.index(after) + 1 :]
    shown = items[:limit]
    listed: dict[str, Any] = {"object": "list", "data": shown, "has_more": len(items) > limit}
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return msgspec.Raw(msgspec.json.encode({**listed, **ends}))


def _find(request: Request, response_id: str) -> StoredResponse:
    found = context_of(request).responses.find(response_id, exchange_of(request.scope).tenant)
    if found is None:
        raise response_not_found(response_id, "response_id")
    return found
