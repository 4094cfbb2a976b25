"""POST /v1/chat/completions"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.answers.chat import ChatRenderer
from ratoon.api.server.answers.flow import answer_stream, answer_whole
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generation import Batch, asked_lengths, check_token_limit, make_id, names_of
from ratoon.api.server.json_body import read_body
from ratoon.api.server.origins import chat_origin
from ratoon.api.server.prompts import UNKNOWN_PROMPT, EncodedPrompt, encode_chat
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest, Message
from ratoon.api.server.routes.documented import MODEL, WITH_BODY, answers, body
from ratoon.core.errors import RequestError

router = APIRouter(tags=["OpenAI"])
EXAMPLE = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    "max_tokens": 32,
    "temperature": 0,
}


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    responses=answers(ChatCompletion, *WITH_BODY, 404, 429, stream_of=ChatCompletionChunk),
    openapi_extra=body(ChatCompletionRequest, EXAMPLE),
    response_model=None,
)
async def create_chat_completion(request: Request) -> Response:
    context = context_of(request)
    asked = await read_body(request, ChatCompletionRequest)
    exchange = exchange_of(request.scope)
    try:
        batch = await make_batch(context, asked, exchange)
        exchange.notes = batch.prompts[0].notes if batch.origin is None else batch.origin.notes
        renderer = ChatRenderer(context, asked, batch)
        return await (answer_stream if asked.stream else answer_whole)(request, renderer)
    except RequestError as error:
        raise type(error)(asked.body_name(error.field), error.problem, error.expected) from None


async def make_batch(context: ServerContext, asked: ChatCompletionRequest, exchange: Exchange) -> Batch:
    """The engine's part of the request. ApiError or RequestError for whatever is wrong with it."""
    context.check_model(asked.model)
    context.llm.verify_generates()
    check_support(context, asked)
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    params = asked.generation_params(
        context.llm.get_default_sampling_params(),
        context.llm.get_default_beam_search_params(),
        asked_lengths(context, max_tokens, None),
        (asked.top_logprobs or 0) if asked.logprobs else None,
        asked.prompt_logprobs,
    )
    size = len(exchange.body)
    origin = await chat_origin(context, asked, size)
    prompt, fallback = UNKNOWN_PROMPT, None
    if origin is None:
        prompt = await encode_conversation(context, asked, size, "messages", asked.messages)
    elif asked.fallback_messages is not None:
        messages = asked.fallback_messages
        fallback = partial(encode_conversation, context, asked, size, "fallback_messages", messages)
    check_token_limit(context, 1, params, len(prompt.token_ids))
    return Batch(
        id=make_id("chatcmpl", asked.request_id),
        prompts=[prompt],
        params=params,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        data_parallel_rank=asked.data_parallel_rank,
        param="messages",
        owner=exchange.tenant,
        retain_kv=asked.retain_kv,
        origin=origin,
        fallback=fallback,
        names=names_of(asked.request_id, exchange),
        trace_headers=exchange.trace_headers,
    )


async def encode_conversation(
    context: ServerContext, asked: ChatCompletionRequest, size: int, param: str, messages: list[Message]
) -> EncodedPrompt:
    """`param` is where in the body the messages stand."""
    return await encode_chat(
        context,
        messages,
        param=param,
        size=size,
        tools=None if asked.tool_choice == "none" else asked.tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        add_special_tokens=bool(asked.add_special_tokens),
        variables=asked.chat_template_kwargs,
        template=asked.chat_template,
    )


def check_support(context: ServerContext, asked: ChatCompletionRequest) -> None:
    """Refuse what the protocol has and this server has not, each by its name."""
    asked.check_companions()
    if asked.response_format is not None and asked.response_format.type != "text":
        problem = f"{asked.response_format.type!r} is not supported yet"
        raise refused("response_format", problem, '{"type": "text"}, or leave it out', code="unsupported_parameter")
    if asked.tool_choice not in (None, "none", "auto"):
        problem = "a call can't be forced yet"
        raise refused("tool_choice", problem, '"auto", "none", or leave it out', code="unsupported_parameter")
    if asked.modalities not in (None, ["text"]):
        raise refused("modalities", "only text comes out", '["text"], or leave it out', code="unsupported_parameter")
    if asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "has no meaning without logprobs", "set logprobs to true, or leave it out")
    if asked.chat_template is not None and not context.settings.allow_request_template:
        expected = "leave it out; ratoon serve --allow-request-template allows it"
        raise refused("chat_template", "requests may not bring one to this server", expected)
