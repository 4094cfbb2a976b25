"""POST /v1/chat/completions: the route, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.answer_parts.parser import AnswerParser
from ratoon.api.answer_parts.parts import (
    ContentDelta,
    Part,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    WholeAnswer,
)
from ratoon.api.answer_parts.plan import AnswerPlan
from ratoon.api.answer_parts.tool_use import ToolUse, tool_use
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.continuations import chat_origin
from ratoon.api.server.errors import refused
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generated_answers import Renderer, answer_stream, answer_whole, figures
from ratoon.api.server.generation import Batch, asked_lengths, check_token_limit, engine_options, make_id, names_of
from ratoon.api.server.logprobs import chat_logprobs, prompt_logprobs
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import UNKNOWN_PROMPT, EncodedPrompt, count_text, encode_chat, template_options
from ratoon.api.server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest, Message
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.threads import off_loop
from ratoon.core.errors import RequestError
from ratoon.core.outputs import CompletionOutput, RequestOutput
from ratoon.core.params import SamplingParams

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
    responses=answers(ChatCompletion, *WITH_BODY, 404, 409, 429, stream_of=ChatCompletionChunk),
    openapi_extra=body(ChatCompletionRequest, EXAMPLE),
)
async def create_chat_completion(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    async with context.preparation.place(exchange.tenant, exchange.body_size) as place:
        asked = await read_body(request, ChatCompletionRequest)
        try:
            plan = plan_answers(context, asked)
            batch = await make_batch(context, asked, exchange, plan)
            exchange.notes = batch.prompts[0].notes if batch.origin is None else batch.origin.notes
            renderer = ChatRenderer(context, asked, batch, plan)
            place.give_back()
            return await (answer_stream if asked.stream else answer_whole)(request, renderer)
        except RequestError as error:
            raise type(error)(asked.body_name(error.field), error.problem, error.expected) from None


def plan_answers(context: ServerContext, asked: ChatCompletionRequest) -> AnswerPlan:
    """Plans how answers are read. ApiError or RequestError if the request is invalid."""
    context.check_model(asked.model)
    context.llm.verify_generates()
    check_support(context, asked)
    tools = None if asked.tools is None else [tool.model_dump(exclude_unset=True) for tool in asked.tools]
    use = tool_use(tools, asked.tool_choice, asked.parallel_tool_calls)
    return context.answer_plan(use, asked.chat_template, asked.continued_text())


async def make_batch(
    context: ServerContext, asked: ChatCompletionRequest, exchange: Exchange, plan: AnswerPlan
) -> Batch:
    """Returns the engine's part of the request. ApiError or RequestError if it is invalid."""
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    params = asked.generation_params(
        context.llm.get_default_sampling_params(),
        context.llm.get_default_beam_search_params(),
        asked_lengths(context, max_tokens, None),
        (asked.top_logprobs or 0) if asked.logprobs else None,
        asked.prompt_logprobs,
    )
    size = exchange.body_size
    origin = await chat_origin(context, asked, plan.tools, size)
    prompt, fallback = UNKNOWN_PROMPT, None
    if origin is None:
        prompt = await encode_conversation(context, asked, plan.tools, size, "messages", asked.messages)
    elif asked.fallback_messages is not None:
        messages = asked.fallback_messages
        fallback = partial(encode_conversation, context, asked, plan.tools, size, "fallback_messages", messages)
    check_token_limit(context, 1, params, len(prompt.token_ids))
    text = prompt.text if origin is None else origin.text
    params = await off_loop(size, partial(plan.params, params, text))
    if asked.prediction is not None and isinstance(params, SamplingParams):
        expected = await count_text(context, "prediction.content", asked.prediction.content, False)
        params = msgspec.structs.replace(params, prediction=expected)
    return Batch(
        id=make_id("chatcmpl", asked.request_id),
        prompts=[prompt],
        params=params,
        options=engine_options(context, asked, exchange),
        cache_salt=asked.cache_salt,
        param="messages",
        owner=exchange.tenant,
        origin=origin,
        fallback=fallback,
        names=names_of(asked.request_id, exchange),
    )


async def encode_conversation(
    context: ServerContext,
    asked: ChatCompletionRequest,
    tools: ToolUse,
    size: int,
    param: str,
    messages: list[Message],
) -> EncodedPrompt:
    """Encodes the conversation. `param` is the field of the body with the messages."""
    return await encode_chat(
        context,
        messages,
        param=param,
        size=size,
        add_special_tokens=bool(asked.add_special_tokens),
        processor_options=asked.mm_processor_kwargs,
        **template_options(asked, tools),
    )


def check_support(context: ServerContext, asked: ChatCompletionRequest) -> None:
    """Refuses fields of the protocol that this server does not support, each by its name."""
    asked.check_companions()
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

    def __init__(self, context: ServerContext, asked: ChatCompletionRequest, batch: Batch, plan: AnswerPlan) -> None:
        super().__init__(context, asked, batch)
        self._logprobs = bool(asked.logprobs)
        self._num_top = asked.top_logprobs or 0
        self._begun: set[int] = set()  # choices of which the first chunk was built
        self._includes_reasoning = asked.include_reasoning is not False
        prompt = batch.prompts[0].text if batch.origin is None else batch.origin.text
        self._readers = [ChoiceReader(plan.parser(prompt)) for _ in range(self.num_choices if plan.has_parts else 0)]

    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        return {"choices": [self._whole_choice(choice) for choice in output.outputs], **self._about_prompt(output)}

    def _whole_choice(self, choice: CompletionOutput) -> dict[str, Any]:
        if not self._readers:
            return self._choice(choice, "message", {"role": ROLE, "content": choice.text})
        reader = self._readers[choice.index]
        answer = WholeAnswer()
        answer.add(reader.read(choice))
        if not self._includes_reasoning:
            answer.reasoning = ""
        return self._choice(choice, "message", answer.as_openai_message(), reader.finish_reason(choice))

    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if len(self._begun) < self.num_choices:
            yield from self._role_chunks(output)
        for choice in output.outputs:
            if self._readers:
                yield from self._parts_chunks(choice)
            elif self.is_worth_sending(choice):
                yield {"choices": [self._choice(choice, "delta", {"content": choice.text})]}

    def _parts_chunks(self, choice: CompletionOutput) -> Iterator[dict[str, Any]]:
        """Yields a chunk for each part. The first one has what is said of the tokens; the end has a chunk of its
        own."""
        reader = self._readers[choice.index]
        deltas = [delta_of(part) for part in reader.read(choice) if self._is_wanted(part)]
        if choice.finished or (not deltas and (self.return_token_ids or choice.logprobs is not None)):
            deltas.append({})
        chunks = [{**self.plain_choice(choice.index), "delta": delta} for delta in deltas]
        if chunks:
            about = self._choice(choice, "delta", {})
            ends = {"finish_reason": reader.finish_reason(choice), "stop_reason": about.pop("stop_reason")}
            chunks[0] = {**about, "delta": chunks[0]["delta"], "finish_reason": None, "stop_reason": None}
            chunks[-1] |= ends
        for chunk in chunks:
            yield {"choices": [chunk]}

    def _is_wanted(self, part: Part) -> bool:
        return self._includes_reasoning or not isinstance(part, ReasoningDelta)

    def _role_chunks(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The first chunk of each choice has the role; the very first one also has the prompt's fields. How many texts
        a search finds is known at its end."""
        about_prompt = {} if self._begun else self._about_prompt(output)
        places = range(self.num_choices) if self._search is None else [0, *(choice.index for choice in output.outputs)]
        for place in places:
            if place in self._begun:
                continue
            self._begun.add(place)
            choice: dict[str, Any] = {"index": place, "delta": {"role": ROLE, "content": ""}}
            yield {"choices": [{**choice, "logprobs": None, "finish_reason": None}], **about_prompt}
            about_prompt = {}

    def plain_choice(self, place: int, text: str = "") -> dict[str, Any]:
        delta = {"content": text}
        return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def has_begun(self, place: int) -> bool:
        return place in self._begun and not self._readers  # chunks with parts differ in more than their text

    def _choice(
        self, choice: CompletionOutput, name: str, words: Mapping[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        """Returns a choice. `words` is a message or a delta; `name` says which."""
        body: dict[str, Any] = {
            "index": choice.index,
            name: words,
            "logprobs": None,
            "finish_reason": finish_reason or choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **figures(choice),
        }
        if self._logprobs and choice.logprobs is not None:
            texts, num_top = self.context.token_texts, self._num_top
            entries = chat_logprobs(texts, choice.token_ids, choice.logprobs, num_top, self.return_token_ids)
            body["logprobs"] = {"content": entries}
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


# ---- the parts of an answer ----

TOOL_CALLS = "tool_calls"


class ChoiceReader:
    """Reads one choice, as a whole or piece by piece."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._has_calls = False

    def read(self, choice: CompletionOutput) -> list[Part]:
        """Returns the parts of a choice's new text."""
        parts = self._parser.push(choice.text)
        if choice.finished:
            parts += self._parser.finish()
        self._has_calls = self._has_calls or any(isinstance(part, ToolCallBegin) for part in parts)
        return parts

    def finish_reason(self, choice: CompletionOutput) -> str | None:
        """The finish reason as the client is told. An answer that max_tokens ended may have an incomplete call, and
        says so."""
        return TOOL_CALLS if self._has_calls and choice.finish_reason == "stop" else choice.finish_reason


def delta_of(part: Part) -> dict[str, Any]:
    match part:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {TOOL_CALLS: [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {TOOL_CALLS: [{"index": index, "function": {"arguments": text}}]}
