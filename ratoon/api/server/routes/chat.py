"""POST /v1/chat/completions: the route, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.continuations import chat_origin
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generated_answers import Renderer, answer_stream, answer_whole, figures
from ratoon.api.server.generation import Batch, asked_lengths, check_token_limit, engine_options, make_id, names_of
from ratoon.api.server.logprobs import chat_logprobs, prompt_logprobs
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import UNKNOWN_PROMPT, EncodedPrompt, encode_chat
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest, Message
from ratoon.api.server.request_bodies import read_body
from ratoon.core.errors import RequestError
from ratoon.core.outputs import CompletionOutput, RequestOutput

router = APIRouter(tags=["OpenAI"])
ROLE = "assistant"
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
    """The engine's part of the request. ApiError or RequestError if it is invalid."""
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
        options=engine_options(asked, exchange),
        cache_salt=asked.cache_salt,
        param="messages",
        owner=exchange.tenant,
        origin=origin,
        fallback=fallback,
        names=names_of(asked.request_id, exchange),
    )


async def encode_conversation(
    context: ServerContext, asked: ChatCompletionRequest, size: int, param: str, messages: list[Message]
) -> EncodedPrompt:
    """`param` is the field of the body with the messages."""
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
    """Refuse fields of the protocol that this server does not support, each by its name."""
    asked.check_companions()
    if asked.tool_choice not in (None, "none", "auto"):
        problem = "a call can't be forced yet"
        raise refused("tool_choice", problem, '"auto", "none", or leave it out', code="unsupported_parameter")
    if asked.modalities not in (None, ["text"]):
        raise refused("modalities", "only text is generated", '["text"], or leave it out', code="unsupported_parameter")
    if asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "has no meaning without logprobs", "set logprobs to true, or leave it out")
    if asked.chat_template is not None and not context.settings.allow_request_template:
        expected = "leave it out; ratoon serve --allow-request-template allows it"
        raise refused("chat_template", "this server does not accept templates of requests", expected)


class ChatRenderer(Renderer):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, context: ServerContext, asked: ChatCompletionRequest, batch: Batch) -> None:
        super().__init__(context, asked, batch)
        self._logprobs = bool(asked.logprobs)
        self._num_top = asked.top_logprobs or 0
        self._begun = False

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = [self._choice(choice, "message", {"role": ROLE, "content": choice.text}) for choice in output.outputs]
        return {"choices": choices, **self._about_prompt(output)}

    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield from self._role_chunks(output)
        for choice in output.outputs:
            if self.is_worth_sending(choice):
                yield {"choices": [self._choice(choice, "delta", {"content": choice.text})]}

    def _role_chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The first chunk of each choice has the role; the very first one also has the prompt's fields."""
        about_prompt = self._about_prompt(output)
        for place in range(self.num_choices):
            choice: dict[str, Any] = {"index": place, "delta": {"role": ROLE, "content": ""}}
            yield {"choices": [{**choice, "logprobs": None, "finish_reason": None}], **about_prompt}
            about_prompt = {}

    def plain_choice(self, place: int, text: str = "") -> dict[str, Any]:
        delta = {"content": text}
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def has_begun(self, place: int) -> bool:
        return self._begun

    def _choice(self, choice: CompletionOutput, name: str, words: dict[str, str]) -> dict[str, Any]:
        """`words` is a message or a delta; `name` says which."""
        body: dict[str, Any] = {
            "index": choice.index,
            name: words,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **figures(choice),
        }
        if self._logprobs and choice.logprobs is not None:
            body["logprobs"] = chat_logprobs(self.context.token_texts, choice.token_ids, choice.logprobs, self._num_top)
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.return_token_ids:
            about["prompt_token_ids"] = output.prompt_token_ids
        return about
