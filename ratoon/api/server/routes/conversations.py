"""/v1/conversations: make, retrieve, change and delete a conversation, and list, add, retrieve and delete its items.

A response that names a conversation reads its items, and adds its own when it has ended (routes/responses.py).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import ApiError, conversation_not_found, refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.media import kinds_of
from ratoon.api.server.openapi import WITH_BODY, answers, body
from ratoon.api.server.protocol.conversations import (
    ConversationAnswer,
    ConversationItem,
    ConversationRequest,
    ConversationUpdate,
    DeletedConversation,
    ItemsRequest,
)
from ratoon.api.server.protocol.responses import InputItems
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.response_items import Item, find_items, new_id, read_input, referred_items, store_items
from ratoon.api.server.response_runs import find_conversation
from ratoon.api.server.responses import json_response
from ratoon.api.server.routes.responses import encode_page
from ratoon.api.server.stored_turns import StoredConversation, Turn, items_of, turns_up_to
from ratoon.api.server.threads import off_loop

router = APIRouter(tags=["OpenAI"])
FIELD = "items"
MESSAGE = {"role": "user", "content": "Hello"}
NOTHING_IS_KEPT = (
    "this server keeps no conversations (--max-responses 0): send the whole conversation in the input of each "
    "response, or start the server with a larger --max-responses"
)


@router.post(
    "/v1/conversations",
    summary="Make a conversation, which responses continue",
    responses=answers(ConversationAnswer, *WITH_BODY, 404),
    openapi_extra=body(ConversationRequest, {"items": [MESSAGE], "metadata": {"topic": "demo"}}),
)
async def create_conversation(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    asked = await read_body(request, ConversationRequest)
    if not context.settings.max_responses:
        raise ApiError(400, NOTHING_IS_KEPT, code="conversations_not_kept")
    items = await _read_items(context, exchange, asked.items or [], 0)
    turn = Turn(None, await off_loop(exchange.body_size, partial(store_items, items))) if items else None
    made = StoredConversation(new_id("conv"), exchange.tenant, turn, dict(asked.metadata or {}))
    await context.shared.responses.add_conversation(made)
    return json_response(request, made.answer())


@router.get(
    "/v1/conversations/{conversation_id}",
    summary="Retrieve a conversation, without its items",
    responses=answers(ConversationAnswer, 404),
)
async def get_conversation(request: Request, conversation_id: str) -> Response:
    return json_response(request, (await _find(request, conversation_id)).answer())


@router.post(
    "/v1/conversations/{conversation_id}",
    summary="Change the metadata of a conversation",
    responses=answers(ConversationAnswer, *WITH_BODY, 404),
    openapi_extra=body(ConversationUpdate, {"metadata": {"topic": "another"}}),
)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    asked = await read_body(request, ConversationUpdate)
    responses, owner = context_of(request).shared.responses, exchange_of(request.scope).tenant
    found = await responses.set_metadata(conversation_id, owner, dict(asked.metadata))
    return json_response(request, _present(found, conversation_id).answer())


@router.delete(
    "/v1/conversations/{conversation_id}",
    summary="Delete a conversation; the responses in it stay",
    responses=answers(DeletedConversation, 404),
)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    responses, owner = context_of(request).shared.responses, exchange_of(request.scope).tenant
    if not await responses.delete_conversation(conversation_id, owner):
        raise conversation_not_found(conversation_id)
    return json_response(request, {"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get(
    "/v1/conversations/{conversation_id}/items",
    summary="List the items of a conversation",
    responses=answers(InputItems, 400, 404),
)
async def list_items(
    request: Request,
    conversation_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest first")] = "desc",
    after: Annotated[str | None, Query(description="Only items after the one with this id")] = None,
) -> Response:
    turn = (found := await _find(request, conversation_id)).turn

    def page() -> msgspec.Raw:
        return encode_page(items_of(turn), limit, order == "desc", after, "conversation")

    return json_response(request, await off_loop(found.num_bytes_of_turns, page))


@router.post(
    "/v1/conversations/{conversation_id}/items",
    summary="Add items to a conversation",
    responses=answers(InputItems, *WITH_BODY, 404),
    openapi_extra=body(ItemsRequest, {"items": [MESSAGE]}),
)
async def create_items(request: Request, conversation_id: str) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    found = await _find(request, conversation_id)
    asked = await read_body(request, ItemsRequest)
    items = await _read_items(context, exchange, asked.items, found.num_bytes_of_turns)
    if items:
        stored = await off_loop(exchange.body_size, partial(store_items, items))
        added = await context.shared.responses.add_items(conversation_id, exchange.tenant, stored)
        _present(added, conversation_id)
    size = max(1, len(items))
    page = await off_loop(exchange.body_size, lambda: encode_page(items, size, False, None, "conversation"))
    return json_response(request, page)


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Retrieve an item of a conversation",
    responses=answers(ConversationItem, 404),
)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    turns = list(turns_up_to((await _find(request, conversation_id)).turn))
    stored = [items for turn in turns for items in (turn.output, turn.input)]
    size = sum(turn.own_bytes for turn in turns)
    found = await off_loop(size, lambda: find_items([item_id], stored))
    if item_id not in found:
        raise _no_item(item_id)
    return json_response(request, found[item_id].item)


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    summary="Delete an item of a conversation; responses keep what they were asked",
    responses=answers(ConversationAnswer, 404),
)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    responses, owner = context_of(request).shared.responses, exchange_of(request.scope).tenant
    done = await responses.remove_item(conversation_id, owner, item_id)
    if done is None:
        raise conversation_not_found(conversation_id)
    conversation, was_there = done
    if not was_there:
        raise _no_item(item_id)
    return json_response(request, conversation.answer())


async def _find(request: Request, conversation_id: str) -> StoredConversation:
    return await find_conversation(context_of(request), conversation_id, exchange_of(request.scope).tenant)


def _present(found: StoredConversation | None, conversation_id: str) -> StoredConversation:
    if found is None:
        raise conversation_not_found(conversation_id)
    return found


def _no_item(item_id: str) -> ApiError:
    shown = item_id if len(item_id) <= 200 else item_id[:200] + "…"
    return ApiError(404, f"item_id: the conversation has no item {shown!r}", param="item_id", code="item_not_found")


async def _read_items(
    context: ServerContext, exchange: Exchange, given: list[Item], num_bytes_before: int
) -> list[Item]:
    """Returns the items of a request, checked. ApiError if one is wrong, or if no response could read them all."""
    size, most = exchange.body_size, context.settings.max_body
    if size + num_bytes_before > most:
        problem = f"the conversation would have {size + num_bytes_before} bytes"
        raise refused(FIELD, problem, f"at most {most} (--max-body)")
    known = await context.shared.responses.find_items(referred_items(given), exchange.tenant)
    return await off_loop(size, partial(read_input, given, known, most, kinds_of(context), FIELD))
