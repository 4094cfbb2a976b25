"""/tokenize and /detokenize: the model's tokenizer, as the server uses it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ratoon.api.server.protocol.base import AnswerModel, Entries, RequestModel
from ratoon.api.server.protocol.chat import Message, Tool

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    model: str | None = Field(None, description="The served model's name; may be left out")
    prompt: str | None = None
    messages: Entries[Message] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add what the model expects around a text; default: to a prompt, not to messages"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Entries[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="The tokens as the vocabulary writes them, too")


class Tokenized(AnswerModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = Field(None, description="The served model's name; may be left out")
    tokens: Entries[TokenId]


class Detokenized(AnswerModel):
    prompt: str
