"""/v1/conversations: OpenAI's Conversations API. Items are checked in response_items.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import AnswerModel, Metadata, RequestModel
from ratoon.api.server.protocol.responses import ITEM

MAX_ITEMS = 20  # that are added at a time, as OpenAI has it


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("is not a list of items")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"has {len(value)} entries; {MAX_ITEMS} at most")
    return value


Items = Annotated[
    list[dict[str, Any]],
    PlainValidator(_items),
    WithJsonSchema({"type": "array", "items": ITEM, "maxItems": MAX_ITEMS}),
]


class ConversationRequest(RequestModel):
    items: Items | None = Field(None, description="Its first items; up to 20")
    metadata: Metadata | None = Field(None, description="Returned with the conversation")
    model: str | None = Field(None, description="Of a server with several models: the one that it belongs to")


class ConversationUpdate(RequestModel):
    metadata: Metadata = Field(description="In the place of what it has")


class ItemsRequest(RequestModel):
    items: Items = Field(description="Items behind those that it has; up to 20")


# ---- answers ----


class ConversationAnswer(AnswerModel):
    id: str = Field(description="For the field conversation of a response")
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(AnswerModel):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ConversationItem(AnswerModel):
    """Its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
