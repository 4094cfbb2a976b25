"""/v1/messages: Anthropic's Messages API, and the count of a conversation's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.answer_parts.plan import AnswerPlan
from ratoon.api.answer_parts.reasoning_formats import SWITCHES, effort_variables
from ratoon.api.answer_parts.tool_use import tool_use
from ratoon.api.server.context import ServerContext, context_of
from ratoon.api.server.errors import ApiError, aborted, refused, shutting_down
from ratoon.api.server.exchange import Exchange, exchange_of
from ratoon.api.server.generated_answers import UsageCounter
from ratoon.api.server.generation import Batch, check_token_limit, names_of, session_of, stream
from ratoon.api.server.media import check_media, kinds_of, load_media
from ratoon.api.server.message_blocks import BlockBuilder, Conversation, read_conversation
from ratoon.api.server.openapi import MODEL, WITH_BODY, answers, body
from ratoon.api.server.prompts import EncodedPrompt, count_text, encode_within_context, render_messages
from ratoon.api.server.protocol.messages import (
    CountedMessages,
    MessageAnswer,
    MessageEvent,
    MessagesErrorAnswer,
    MessagesRequest,
    TokensCount,
)
from ratoon.api.server.request_bodies import read_body
from ratoon.api.server.response_events import typed_event
from ratoon.api.server.response_items import new_id
from ratoon.api.server.responses import json_response, large_response, messages_error
from ratoon.api.server.threads import off_loop
from ratoon.api.server.typed_answers import answer_typed_stream, run_to_end
from ratoon.core.errors import RequestError
from ratoon.core.outputs import CompletionOutput, RequestOutput
from ratoon.core.params import RequestOutputKind, SamplingParams
from ratoon.engine.input.default_params import with_given
from ratoon.models.chat_template import RenderedChat

router = APIRouter(tags=["Anthropic"])
PARAM = "messages"
EXAMPLE = {
    "model": MODEL,
    "max_tokens": 32,
    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
}
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "seed", "speculate")
CHARS_OF_TOKEN = 4


@router.post(
    "/v1/messages",
    summary="Answer a conversation, by Anthropic's protocol",
    responses=answers(MessageAnswer, *WITH_BODY, 404, 409, 429, stream_of=MessageEvent, error=MessagesErrorAnswer),
    openapi_extra=body(MessagesRequest, EXAMPLE),
)
async def create_message(request: Request) -> Response:
    context, exchange = context_of(request), exchange_of(request.scope)
    try:
        async with context.preparation.place(exchange.tenant, exchange.body_size):
            asked = await read_body(request, MessagesRequest)
            run = await make_run(context, asked, exchange)
        exchange.notes = run.notes
        if asked.stream:
            return await answer_typed_stream(request, run, partial(_error_event, exchange.request_id))
        await run_to_end(run)
        return await large_response(request, run.answer_size, run.answer)
    except RequestError as error:
        raise _named_as_in_body(error) from None


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation",
    responses=answers(TokensCount, *WITH_BODY, 404, error=MessagesErrorAnswer),
    openapi_extra=body(CountedMessages, {name: EXAMPLE[name] for name in ("model", "messages")}),
)
async def count_tokens(request: Request) -> Response:
    context, size = context_of(request), exchange_of(request.scope).body_size
    asked = await read_body(request, CountedMessages)
    context.check_model(asked.model)
    try:
        plan, conversation = make_plan(context, asked), await read(context, asked, size)
        rendered = await render(context, asked, conversation, plan, size)
        token_ids = await count_text(context, PARAM, rendered.text, False)
        count = len(token_ids)
        media = await load_media(context, conversation.images)
        if media is not None:
            options = asked.mm_processor_kwargs
            prompt = EncodedPrompt(rendered.text, token_ids, media=media, processor_options=options).as_prompt()
            count = await asyncio.to_thread(context.llm.count_tokens, prompt)
    except RequestError as error:
        raise _named_as_in_body(error) from None
    return json_response(request, {"input_tokens": count})


def _named_as_in_body(error: RequestError) -> RequestError:
    field = {"stop": "stop_sequences", "tool_choice.function.name": "tool_choice.name"}.get(error.field, error.field)
    field = field.replace("].function.parameters", "].input_schema")
    if field.partition(".")[0] == "structured_output":
        field = "output_config.format.schema"
    return type(error)(field, error.problem, error.expected)


# ---- the prompt ----


def make_plan(context: ServerContext, asked: CountedMessages) -> AnswerPlan:
    choice = asked.tool_choice
    tools = [tool.as_chat_tool() for tool in asked.tools or ()]
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    use = tool_use(tools, None if choice is None else choice.as_chat_choice(), is_parallel)
    return context.answer_plan(use, continued=_begun_answer(asked))


def _begun_answer(asked: CountedMessages) -> str | None:
    """Returns the text of the last message, if that is the beginning of the answer."""
    last = asked.messages[-1]
    if last.role != "assistant":
        return None
    (message,) = read_conversation(None, [last]).messages
    if "tool_calls" in message:
        raise refused(PARAM, "end with a call of a tool", "its result as the last message")
    return str(message["content"])


async def read(context: ServerContext, asked: CountedMessages, size: int) -> Conversation:
    """Returns the conversation of a request, whose images may be loaded."""
    conversation = await off_loop(size, partial(read_conversation, asked.system, asked.messages, kinds_of(context)))
    check_media(context, conversation.images)
    return conversation


async def render(
    context: ServerContext, asked: CountedMessages, conversation: Conversation, plan: AnswerPlan, size: int
) -> RenderedChat:
    effort = None if asked.output_config is None else asked.output_config.effort
    switches: dict[str, Any] = {}
    if asked.thinking is not None:
        switches = dict.fromkeys(SWITCHES, asked.thinking.type != "disabled")
    try:
        return await render_messages(
            context,
            lambda: conversation.messages,
            size=size,
            param=PARAM,
            tools=plan.tools.tools,
            continue_final_message=plan.continued is not None,
            variables={**effort_variables(effort), **switches, **(asked.chat_template_kwargs or {})},
        )
    except RequestError as error:  # of a message as the template gets it, which has another index
        field = PARAM if error.field.startswith("messages[") else error.field
        raise type(error)(field, error.problem, error.expected) from None


async def make_run(context: ServerContext, asked: MessagesRequest, exchange: Exchange) -> MessageRun:
    """Returns the request as a run. ApiError or RequestError if the request is invalid."""
    context.check_model(asked.model)
    context.llm.verify_generates()
    plan = make_plan(context, asked)
    params = make_params(context, asked)
    conversation = await read(context, asked, exchange.body_size)
    rendered = await render(context, asked, conversation, plan, exchange.body_size)
    token_ids = await encode_within_context(context, PARAM, rendered.text)
    check_token_limit(context, 1, params, len(token_ids))
    media = await load_media(context, conversation.images)
    params = await off_loop(exchange.body_size, partial(plan.params, params, rendered.text))
    batch = Batch(
        id=new_id("msg"),
        prompts=[EncodedPrompt(rendered.text, token_ids, media=media, processor_options=asked.mm_processor_kwargs)],
        params=params,
        options={
            "adapter": context.check_model(asked.model),
            "priority": asked.priority or 0,
            "retain_kv": asked.retain_kv,
            "session": session_of(None, exchange),
            "owner": exchange.tenant,
            "trace_headers": exchange.trace_headers,
        },
        cache_salt=asked.cache_salt,
        param=PARAM,
        owner=exchange.tenant,
        names=names_of(None, exchange),
    )
    return MessageRun(context, asked, batch, plan, rendered.notes)


def make_params(context: ServerContext, asked: MessagesRequest) -> SamplingParams:
    given = {name: value for name in SAMPLING_NAMES if (value := getattr(asked, name)) is not None}
    given |= {
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences or [],
        "structured_output": asked.structured_output(),
        "output_kind": RequestOutputKind.DELTA,
    }
    params = with_given(context.llm.get_default_sampling_params(), given)
    params.verify()
    return params


# ---- the answer ----


class MessageRun:
    """Generates an answer: outputs of the engine go through `take`, which returns their events."""

    def __init__(
        self,
        context: ServerContext,
        asked: MessagesRequest,
        batch: Batch,
        plan: AnswerPlan,
        notes: tuple[str, ...],
    ) -> None:
        self.batch = batch
        self.notes = notes
        self.has_begun = False
        self._context = context
        self._asked = asked
        self._parser = plan.parser(batch.prompts[0].text)
        self._builder = BlockBuilder()
        self._counter = UsageCounter(batch.prompts)
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def generate(self) -> AsyncGenerator[list[bytes], None]:
        async with aclosing(stream(self._context, self.batch)) as outputs:
            async for _, output in outputs:
                if events := self.take(output):
                    yield events

    def takes_long(self, output: RequestOutput) -> bool:
        return False  # text alone

    def take(self, output: RequestOutput) -> list[bytes]:
        events = []
        self._counter.add(0, output)
        if not self.has_begun:
            self.has_begun = True
            events.append(typed_event("message_start", {"message": self.answer(num_output_tokens=0)}))
        (choice,) = output.outputs
        events += self._builder.push(self._parser.push(choice.text))
        if choice.finish_reason is not None:
            events += self._builder.push(self._parser.finish())
            events += self._builder.finish()
            self._stop = self._stopped(choice)
            events.append(typed_event("message_delta", {"delta": self._stop, "usage": self._usage()}))
            events.append(typed_event("message_stop", {}))
        return events

    def _stopped(self, choice: CompletionOutput) -> dict[str, Any]:
        if choice.finish_reason == "abort":
            raise shutting_down() if self._context.draining else aborted()
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            is_full = self._counter.num_completion_tokens < self._asked.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        elif self._builder.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def answer_size(self) -> int:
        """Returns roughly the size of the answer, in characters."""
        return CHARS_OF_TOKEN * self._counter.num_completion_tokens

    def answer(self, num_output_tokens: int | None = None) -> dict[str, Any]:
        usage = self._usage()
        if num_output_tokens is not None:
            usage["output_tokens"] = num_output_tokens
        return {
            "id": self.batch.id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.model,
            "content": self._builder.content,
            **self._stop,
            "usage": usage,
        }

    def _usage(self) -> dict[str, int]:
        usage = self._counter.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            **self._counter.drafts(),
        }


def _error_event(request_id: str, error: ApiError) -> bytes:
    return typed_event("error", messages_error(error, request_id))
