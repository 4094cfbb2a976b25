"""One response from its request to its end: generated for a client that waits, or in the background.

A client that disconnects cancels its response, unless that runs in the background. Errors before the first token are
HTTP errors; later ones, and all of a response in the background, are a part of the response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from ratoon.api.answer_parts.parser import AnswerParser
from ratoon.api.answer_parts.parts import Part
from ratoon.api.answer_parts.tool_use import tool_use
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import (
    ApiError,
    aborted,
    as_api_error,
    conversation_not_found,
    refused,
    shutting_down,
)
from ratoon.api.server.exchange import Exchange
from ratoon.api.server.generated_answers import UsageCounter, answer_size
from ratoon.api.server.generation import (
    Batch,
    Begun,
    asked_lengths,
    check_token_limit,
    names_of,
    retention_of,
    session_of,
    stream,
)
from ratoon.api.server.logprobs import MessageLogprobs
from ratoon.api.server.media import kinds_of
from ratoon.api.server.preparation import Place
from ratoon.api.server.protocol.responses import INCLUDABLE, LOGPROBS, ResponsesRequest
from ratoon.api.server.response_events import EventWriter, OutputBuilder
from ratoon.api.server.response_items import new_id, read_input, referred_items, store_items
from ratoon.api.server.response_prompts import PARAM, PlacedPrompt, place_prompt
from ratoon.api.server.response_store import (
    CANCELLED,
    COMPLETED,
    CONTINUABLE,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    StoredResponse,
    encode_head,
)
from ratoon.api.server.stored_turns import StoredConversation, Turn
from ratoon.api.server.threads import LONG_TEXT, off_loop
from ratoon.core.errors import RequestError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.suggestions import did_you_mean
from ratoon.engine.grammars.validator import validate
from ratoon.engine.input.default_params import with_given
from ratoon.engine.input.request_options import GenerationOptions
from ratoon.observe.logging import get_logger

# Same name and same meaning in SamplingParams. If left out (or null), the model's default applies.
SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "speculate",
)  # fmt: skip
# The engine's names of fields that have another name in this body.
FIELDS = {
    "max_tokens": "max_output_tokens",
    "continuation_of": "previous_response_id",
    "prompt": PARAM,
    "logprobs": "top_logprobs",
}
COUNTED_BYTES = 64 * 1024  # an output that has grown by this much is counted again
LAST_EVENTS = {COMPLETED: "completed", INCOMPLETE: "incomplete", FAILED: "failed", CANCELLED: "incomplete"}

logger = get_logger(__name__)


def response_not_found(response_id: str, param: str) -> ApiError:
    """Returns the same error for an unknown id, an evicted one, and one of another key."""
    shown = response_id if len(response_id) <= 200 else response_id[:200] + "…"
    message = (
        f"{param}: there is no response {shown!r}: it was never stored or was deleted, the server was restarted or has "
        "evicted it, or it belongs to another key; send the whole conversation in input"
    )
    return ApiError(404, message, param=param, code="response_not_found")


def named_as_in_body(error: RequestError) -> RequestError:
    field = FIELDS.get(error.field, error.field).replace("].function.", "].")  # functions are not nested here
    if field.partition(".")[0] == "structured_output":
        field = "text.format.schema"
    return type(error)(field, error.problem, error.expected)


async def find_previous(context: ServerContext, response_id: str, owner: str | None) -> StoredResponse:
    """Returns the response to continue, at its end. ApiError if there is none, or if it has none."""
    found = await context.shared.responses.find_ended(response_id, owner)
    if found is None:
        raise response_not_found(response_id, "previous_response_id")
    if found.status not in CONTINUABLE:
        raise refused("previous_response_id", f"the response is {found.status}", "one that is completed")
    return found


async def find_conversation(context: ServerContext, conversation_id: str, owner: str | None) -> StoredConversation:
    """Returns a conversation as it is now. ApiError if there is none."""
    found = await context.shared.responses.find_conversation(conversation_id, owner)
    if found is None:
        raise conversation_not_found(conversation_id)
    return found


async def _find_conversation(
    context: ServerContext, asked: ResponsesRequest, owner: str | None
) -> StoredConversation | None:
    named = asked.conversation
    return None if named is None else await find_conversation(context, named, owner)


async def _find_parent(
    context: ServerContext, asked: ResponsesRequest, conversation: StoredConversation | None, owner: str | None
) -> StoredResponse | None:
    """Returns the response to go on from. That of a conversation may be gone: its items are there."""
    if asked.previous_response_id is not None:
        return await find_previous(context, asked.previous_response_id, owner)
    if conversation is None or conversation.response_id is None:
        return None
    return await context.shared.responses.find_ended(conversation.response_id, owner)


async def make_run(
    context: ServerContext,
    asked: ResponsesRequest,
    exchange: Exchange,
    place: Place,
    resumed: StoredResponse | None = None,
) -> ResponseRun:
    """Returns the request, checked, with its prompt. ApiError or RequestError if it is invalid. `resumed`: the response
    that another front end has begun to generate for the same request."""
    check_support(asked)
    context.check_model(asked.model)
    context.llm.verify_generates()
    owner = exchange.tenant
    tools = [tool.as_chat_tool() for tool in asked.tools or ()]
    plan = context.answer_plan(tool_use(tools, asked.tool_choice, asked.parallel_tool_calls))
    params = make_params(context, asked)
    conversation = parent = None
    if asked.conversation is not None or asked.previous_response_id is not None:
        async with place.left():
            conversation = await _find_conversation(context, asked, owner)
            parent = await _find_parent(context, asked, conversation, owner)
    before = conversation.turn if conversation is not None else None if parent is None else parent.turn
    size = exchange.body_size
    known = await context.shared.responses.find_items(referred_items(asked.input), owner)
    media, max_body = kinds_of(context), context.settings.max_body
    items = await off_loop(size, partial(read_input, asked.input, known, max_body, media))
    if before is None and not items:
        raise refused(PARAM, "is empty", "text, or items")
    prompt = await place_prompt(context, asked, plan.tools, items, before, parent, size)
    check_token_limit(context, 1, params, prompt.num_tokens, "max_output_tokens")
    params = await off_loop(size, partial(plan.params, params, prompt.text))
    if asked.background and params.structured_output is not None:  # else the engine's front end does it
        await off_loop(size, partial(validate, params.structured_output))
    response_id = new_id("resp") if resumed is None else resumed.id
    session = session_of(asked.prompt_cache_key, exchange)
    if session is None and conversation is not None:
        session = conversation.id
    elif session is None and parent is not None:
        session = parent.session or parent.id
    batch = Batch(
        id=response_id,
        prompts=[prompt.encoded],
        params=params,
        options={
            **_options(context, asked, exchange),
            "session": session or (response_id if asked.is_stored else None),
            "retention": retention_of(asked.prompt_cache_retention),
        },
        cache_salt=asked.cache_salt,
        param=PARAM,
        owner=owner,
        origin=prompt.origin,
        fallback=lambda: prompt.whole(context),
        names=names_of(None, exchange),
    )
    response = StoredResponse(
        id=response_id,
        owner=owner,
        head=await off_loop(size, partial(_head, asked, params)),
        is_background=asked.is_in_background,
        turn=Turn(before, await off_loop(size, partial(store_items, items))),
        previous_id=asked.previous_response_id,
        session=session,
    )
    if conversation is not None:
        response.conversation_id, response.conversation_version = conversation.id, conversation.version
    if asked.is_in_background and context.shared.outlives_front_ends:
        response.body = await off_loop(size, lambda: asked.model_dump_json(exclude_unset=True).encode())
    if resumed is not None:
        response.created_at, response.turn.input = resumed.created_at, resumed.turn.input
    return ResponseRun(context, asked, batch, prompt, response, plan.parser(prompt.text))


def check_support(asked: ResponsesRequest) -> None:
    """Refuses fields that contradict each other, or are not supported."""
    if asked.background and not asked.is_stored:
        raise refused("background", "needs a stored response", "leave store out, or set it to true")
    if asked.conversation is not None and asked.previous_response_id is not None:
        raise refused("conversation", "and previous_response_id both say what comes before", "one of the two")
    if asked.conversation is not None and not asked.is_stored:
        problem = "keeps what is answered in it, and store is false"
        raise refused("conversation", problem, "leave store out, or leave conversation out and send all items in input")
    for index, name in enumerate(asked.include or ()):
        if name not in INCLUDABLE:
            expected = did_you_mean(name, INCLUDABLE, f"one of {', '.join(INCLUDABLE)}")
            raise refused(f"include[{index}]", f"{name[:64]!r} is unknown", expected)
    if asked.top_logprobs and not asked.includes_logprobs:
        expected = f'add "{LOGPROBS}" to include, or leave it out'
        raise refused("top_logprobs", "has no meaning without log-probabilities", expected)


def make_params(context: ServerContext, asked: ResponsesRequest) -> SamplingParams:
    given = {name: value for name in SAMPLING_NAMES if (value := getattr(asked, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    if "logit_bias" in given:  # JSON has no keys but text
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    given |= asked_lengths(context, asked.max_output_tokens, None)
    given |= {"output_kind": RequestOutputKind.DELTA, "structured_output": asked.structured_output()}
    if asked.includes_logprobs:
        given["logprobs"] = asked.top_logprobs or 0
    params = with_given(context.llm.get_default_sampling_params(), given)
    params.verify()
    return params


def _options(context: ServerContext, asked: ResponsesRequest, exchange: Exchange) -> GenerationOptions:
    lease: float | None = asked.retain_kv
    if lease is None and asked.is_stored:
        lease = min(context.settings.response_lease, context.llm.config.cache.max_lease_seconds) or None
    return {
        "adapter": context.check_model(asked.model),
        "priority": asked.priority or 0,
        "retain_kv": lease,
        "owner": exchange.tenant,
        "trace_headers": exchange.trace_headers,
    }


def _head(asked: ResponsesRequest, params: SamplingParams) -> bytes:
    """Returns fields of the answer that repeat the request's."""
    reasoning, text = asked.reasoning, asked.text
    text_format = None if text is None or text.format is None else text.format
    fields = {
        "background": asked.is_in_background,
        "conversation": None if asked.conversation is None else {"id": asked.conversation},
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": asked.is_stored,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"} if text_format is None else text_format.as_answer(),
            "verbosity": None if text is None else text.verbosity,
        },
        "tool_choice": asked.tool_choice or "auto",
        "tools": [tool.as_answer() for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
        "user": asked.user,
    }
    return encode_head(fields)


class ResponseRun:
    """Generates a response: outputs of the engine go through `take`, and its end is one of three."""

    def __init__(
        self,
        context: ServerContext,
        asked: ResponsesRequest,
        batch: Batch,
        prompt: PlacedPrompt,
        response: StoredResponse,
        parser: AnswerParser,
    ) -> None:
        self.response = response
        self.batch = batch
        self.has_begun = False  # a token has come
        self.failure: ApiError | None = None  # after the first token
        self.notes = prompt.notes  # for the client
        self._context = context
        self._prompt = prompt
        self._is_stored = asked.is_stored
        self.is_streamed = bool(asked.stream)
        self._writer = EventWriter(self.is_streamed)
        self._builder = OutputBuilder(response.output, self._writer, response.id)
        self._num_tokens = 0  # of the answer
        self._parser = parser
        self._counter = UsageCounter(batch.prompts)
        self._num_reasoning_tokens = 0
        self._num_silent_tokens = 0  # of which another front end has written the events
        num_top = batch.params.logprobs if isinstance(batch.params, SamplingParams) else None
        self._logprobs = None if num_top is None else MessageLogprobs(context.token_texts, num_top)

    async def generate(self) -> AsyncGenerator[list[bytes], None]:
        """Yields events. An error before the first token is raised; a later one is a part of the response. Closing the
        generator cancels the response."""
        try:
            async with aclosing(stream(self._context, self.batch)) as outputs:
                async for _, output in outputs:
                    if self.takes_long(output):
                        await off_loop(answer_size([output]), partial(self._read_logprobs, output))
                    if events := self.take(output):
                        yield events
        except Exception as error:
            if not self.has_begun:
                raise
            yield self._fail(error)
        finally:
            if self.has_begun and self.response.is_running:  # the client disconnected, or it was cancelled
                self._cancel()

    async def start(self) -> None:
        """Starts to generate the response in the background."""
        responses, response = self._context.shared.responses, self.response
        if self.is_streamed:
            responses.open_log(response)
        response.snapshot = self._builder.snapshot
        await responses.add_background(response)
        self._log_states("created", "queued")
        response.work = asyncio.create_task(self._work())

    def go_on(self, resumed: StoredResponse, begun: EngineCoreRequest | None) -> None:
        """Goes on with a response that another front end has begun. `begun`: its request, if the engine has it. What
        is made again of the tokens that its events are about is made silently."""
        response = self.response
        response.snapshot = self._builder.snapshot
        if begun is not None:
            response.status = IN_PROGRESS
            self.batch.begun = Begun(begun, resumed.num_logged_tokens)
            self._num_silent_tokens = resumed.num_logged_tokens
        self._writer.go_on(resumed.num_events, is_silent=self._num_silent_tokens > 0)
        if resumed.num_events == 0:
            self._log_states("created", "queued")
        response.work = asyncio.create_task(self._work())

    async def _work(self) -> None:
        events: list[bytes] = []
        try:
            async with aclosing(self.generate()) as chunks:
                async for chunk in chunks:
                    self._log(chunk)
        except Exception as error:
            events = self._fail(error)
        finally:
            if self.response.is_running:
                self._cancel()
            self._log(events + self._writer.take())
            if self.is_streamed:
                self._context.shared.responses.end_log(self.response)
            self.response.work = None

    def _log_states(self, *names: str) -> None:
        if self.is_streamed:
            for name in names:
                self._write_state(name)
            self._log(self._writer.take())

    def _log(self, events: list[bytes]) -> None:
        if self.is_streamed and events:
            self._context.shared.responses.log_events(self.response, events, self._num_tokens)

    def take(self, output: RequestOutput) -> list[bytes]:
        """Returns the events of an output of the engine."""
        if not self.has_begun:
            self._begin(output)
        self._counter.add(0, output)
        (choice,) = output.outputs
        self._num_tokens += len(choice.token_ids)
        self._read_logprobs(output)
        parts = self._parser.push(choice.text)
        was_reasoning = self._builder.is_reasoning
        self._push(parts)
        if self._builder.is_reasoning or (was_reasoning and not parts):
            self._num_reasoning_tokens += len(choice.token_ids)
        if choice.finish_reason is not None:
            self._push(self._parser.finish())
            self._finish(choice.finish_reason)
        elif self._builder.num_bytes - self.response.num_output_bytes >= COUNTED_BYTES:
            self.response.num_output_bytes = self._builder.num_bytes
            self._context.shared.responses.settle(self.response)
        if self._num_silent_tokens and self._num_tokens >= self._num_silent_tokens:
            self._num_silent_tokens = 0
            self._writer.speak()
            self._context.llm.engine.take_rest(self.response.id, self.response.owner)
        return self._writer.take()

    def takes_long(self, output: RequestOutput) -> bool:
        return self._logprobs is not None and answer_size([output]) >= LONG_TEXT

    def _read_logprobs(self, output: RequestOutput) -> None:
        """Reads log-probabilities, once for each output: they are gone from it then."""
        (choice,) = output.outputs
        if self._logprobs is not None:
            self._logprobs.add(choice)
        choice.logprobs = None

    def _push(self, parts: list[Part]) -> None:
        self._builder.push(parts, () if self._logprobs is None else self._logprobs.claim(parts))

    def _begin(self, output: RequestOutput) -> None:
        self.has_begun = True
        response, told = self.response, output.continuation
        response.status = IN_PROGRESS
        response.continuation = None if told is None else asdict(told)
        is_continuation = told is not None and not told.fallback
        response.prompt = self._prompt.transcript(is_continuation, len(output.prompt_token_ids or ()))
        if response.is_background:
            self._context.shared.responses.settle(response)
        else:
            self._write_state("created")
            self._keep()
        self._write_state("in_progress")

    def _keep(self) -> None:
        self.response.snapshot = self._builder.snapshot
        if self._is_stored:
            self._context.shared.responses.add(self.response)

    # ---- ends ----

    def _finish(self, finish_reason: str) -> None:
        if finish_reason == "abort":
            raise shutting_down() if self._context.draining else aborted()
        is_cut = finish_reason == "length"
        self._builder.finish(INCOMPLETE if is_cut else COMPLETED)
        self.response.completed_at = None if is_cut else time.time()
        self._end(INCOMPLETE if is_cut else COMPLETED)

    def _fail(self, error: Exception) -> list[bytes]:
        answer = as_api_error(named_as_in_body(error) if isinstance(error, RequestError) else error)
        if answer.status == 500:
            logger.error("a response failed: %s", error, exc_info=None if answer is error else error)
        self.failure = answer
        self._builder.finish(INCOMPLETE)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(answer.status, "server_error")
        self.response.error = {"code": code, "message": answer.message}
        self._end(FAILED)
        return self._writer.take()

    def _cancel(self) -> None:
        if self.response.error is None:
            self._builder.finish(INCOMPLETE)
            self._end(CANCELLED)
        else:  # there is no memory for what it has
            self.response.output.clear()
            self._end(FAILED)

    def _end(self, status: str) -> None:
        response = self.response
        response.status = status
        response.close_output()
        if self.has_begun:
            response.usage = self._usage()
        response.snapshot = None
        self._write_state(LAST_EVENTS[status])
        response.body = b""
        if self._is_stored:
            self._context.shared.responses.settle(response)
        else:
            self._context.forget_soon(response)
        response.ended.set()

    def _write_state(self, name: str) -> None:
        if self.is_streamed:
            self._writer.write(f"response.{name}", response=self.response.answer())

    def _usage(self) -> dict[str, Any]:
        usage = self._counter.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens, **self._counter.drafts()},
            "total_tokens": usage.total_tokens,
        }
