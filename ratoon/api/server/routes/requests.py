"""GET /v1/requests, DELETE /v1/requests/{id}: list and delete the finished requests of a key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import context_of
from ratoon.api.server.errors import request_not_found
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.openapi import answers
from ratoon.api.server.protocol.base import AnswerModel
from ratoon.api.server.responses import json_response, large_response
from ratoon.core.errors import UnknownParentError
from ratoon.engine.output.roots import Root


class EndedChoice(AnswerModel):
    index: int
    completion_tokens: int


class EndedRequest(AnswerModel):
    id: str = Field(description="The value for continuation_of")
    object: Literal["request"]
    ended_at: int = Field(description="Seconds since 1970")
    prompt_tokens: int
    choices: list[EndedChoice]


class EndedRequests(AnswerModel):
    object: Literal["list"]
    data: list[EndedRequest] = Field(description="The newest first")
    has_more: bool


class ForgottenRequest(AnswerModel):
    id: str
    object: Literal["request.deleted"]
    deleted: Literal[True]


router = APIRouter(tags=["Continuations"])
ROOT_SIZE = 100  # characters: roughly what a request takes in the list


@router.get(
    "/v1/requests",
    summary="List finished requests that can be continued",
    responses=answers(EndedRequests, 400),
)
async def list_requests(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    roots = await context_of(request).shared.list_roots(exchange_of(request.scope).tenant)
    listed = roots[:limit]

    def build() -> dict[str, Any]:
        return {"object": "list", "data": [describe_root(root) for root in listed], "has_more": len(roots) > limit}

    return await large_response(request, ROOT_SIZE * len(listed), build)


@router.delete(
    "/v1/requests/{request_id}",
    summary="Delete one, and free the memory that was kept for its continuations",
    responses=answers(ForgottenRequest, 404),
)
async def forget_request(request: Request, request_id: str) -> Response:
    context, owner = context_of(request), exchange_of(request.scope).tenant
    found_id = await context.shared.resolve(request_id, owner)
    try:
        await context.llm.forget(found_id, owner)
    except UnknownParentError:
        raise request_not_found(request_id, "request_id") from None
    return json_response(request, {"id": found_id, "object": "request.deleted", "deleted": True})


def describe_root(root: Root) -> dict[str, Any]:
    return {
        "id": root.request_id,
        "object": "request",
        "ended_at": int(root.ended_at),
        "prompt_tokens": len(root.prompt_token_ids),
        "choices": [
            {"index": index, "completion_tokens": len(token_ids)} for index, token_ids in enumerate(root.choices)
        ],
    }
