"""POST /tokenize and /detokenize: the model's tokenizer, as the server uses it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import exchange_of
from ratoon.api.server.openapi import WITH_BODY, answers, body
from ratoon.api.server.prompts import count_text, encode_chat
from ratoon.api.server.protocol.base import AnswerModel, Entries, RequestModel
from ratoon.api.server.protocol.chat import Message, Tool
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.responses import large_response
from ratoon.api.server.threads import off_loop

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(RequestModel):
    """Either a prompt or messages."""

    model: str | None = Field(None, description="The served model's name; may be left out")
    prompt: str | None = None
    messages: Entries[Message] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; default: to a prompt, not to messages"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Entries[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="Also return the tokens as written in the vocabulary")


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


router = APIRouter(tags=["Tokens"])


@router.post(
    "/tokenize",
    summary="Turn a prompt or a conversation into token ids",
    responses=answers(Tokenized, *WITH_BODY, 404),
    openapi_extra=body(TokenizeRequest, {"prompt": "Rice is a grass."}),
)
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, TokenizeRequest)
    if asked.model is not None:
        context.check_model(asked.model)
    token_ids = await encode(context, asked, exchange_of(request.scope).body_size)
    answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": context.max_model_len}

    def build() -> dict[str, Any]:
        return {**answer, "token_strs": name_tokens(context, token_ids)} if asked.return_token_strs else answer

    return await large_response(request, len(token_ids), build)


def name_tokens(context: ServerContext, token_ids: list[int]) -> list[str]:
    tokenizer = context.llm.get_tokenizer()
    names = {token_id: tokenizer.id_to_token(token_id) or "" for token_id in set(token_ids)}
    return [names[token_id] for token_id in token_ids]


async def encode(context: ServerContext, asked: TokenizeRequest, body_size: int) -> list[int]:
    """Returns the tokens of a request's prompt; they may exceed the model's length."""
    if (asked.prompt is None) == (asked.messages is None):
        raise refused("prompt", "one of prompt and messages is needed", "either of them, not both")
    if asked.messages is not None:
        chat = await encode_chat(
            context,
            asked.messages,
            size=body_size,
            tools=[tool.model_dump(exclude_unset=True) for tool in asked.tools or ()],
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=bool(asked.continue_final_message),
            add_special_tokens=bool(asked.add_special_tokens),
            variables=asked.chat_template_kwargs,
            is_counted=True,
        )
        return chat.token_ids
    return await count_text(context, "prompt", asked.prompt or "", asked.add_special_tokens is not False)


@router.post(
    "/detokenize",
    summary="Turn token ids into text",
    responses=answers(Detokenized, *WITH_BODY, 404),
    openapi_extra=body(DetokenizeRequest, {"tokens": [40, 41, 42]}),
)
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, DetokenizeRequest)
    if asked.model is not None:
        context.check_model(asked.model)
    vocab_size = context.llm.source.config.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        problem = f"token id {max(asked.tokens)} is not in the vocabulary"
        raise refused("tokens", problem, f"ids from 0 to {vocab_size - 1}")
    tokenizer = context.llm.get_tokenizer()
    text = await off_loop(len(asked.tokens), lambda: tokenizer.decode(asked.tokens, False))
    return await large_response(request, len(text), lambda: {"prompt": text})
