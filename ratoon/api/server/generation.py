"""Runs a request's prompts in the engine, an engine request for each, and merges their outputs.

The form of the answer is not decided here. However a request ends (answered, refused, client disconnected),
nothing of it stays in the engine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ratoon.api.server.context import ServerContext
from ratoon.api.server.continuations import Origin, find_place
from ratoon.api.server.errors import aborted, generation_failed, refused, request_not_found, shutting_down
from ratoon.api.server.exchange import Exchange
from ratoon.api.server.prompts import EncodedPrompt
from ratoon.api.server.protocol.sampling import SamplingFields
from ratoon.core.errors import RequestError, UnknownParentError
from ratoon.core.outputs import RequestOutput
from ratoon.core.params import BeamSearchParams, GenerationParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.input.default_params import sets_length
from ratoon.engine.input.input_processor import MAX_SESSION
from ratoon.engine.input.prompts import SUFFIX
from ratoon.engine.input.request_options import ContinuationOptions, GenerationOptions
from ratoon.engine.output.output_collector import Take

CONTINUATION_FIELDS = {"choice": "continuation_choice", "at": "continuation_at"}  # as the engine and the body call them
# The engine's name of the body's one prompt: for an encoder-decoder model it is the encoder's.
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "encoder_prompt", "encoder_prompt_token_ids", "multi_modal_data")

T = TypeVar("T")
Numbered = tuple[int, RequestOutput]  # the prompt's index in the request, and its new output


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that the engine has, and that another front end began."""

    request: EngineCoreRequest
    num_tokens: int  # that come first, before further ones are asked for


@dataclass(slots=True)
class Batch:
    """The prompts of one HTTP request; all other fields are shared."""

    id: str  # of the answer
    prompts: list[EncodedPrompt]
    params: GenerationParams
    options: GenerationOptions  # further options for the engine
    cache_salt: str | None = None  # of prompts; a continuation has its parent's
    param: str = "prompt"  # the field of the body with the prompts
    owner: str | None = None  # only the same owner can continue the answers
    origin: Origin | None = None  # set: a continuation; its one prompt is built in the engine
    fallback: Callable[[], Awaitable[EncodedPrompt]] | None = None  # its prompt if the parent is unknown
    names: tuple[str, ...] = ()  # the client's names for the request, beside the id
    has_media_field: bool = False  # the body has the field multi_modal_data, and not parts of messages
    only_prompt: bool = False  # score the prompt: the engine still generates one token, which is not sent
    begun: Begun | None = None  # set: the engine has the one prompt already
    take: Take | None = None  # takes outputs of a single prompt in place of the stream's reader

    def request_id(self, index: int) -> str:
        """A single prompt's engine request has the answer's id."""
        return self.id if len(self.prompts) == 1 else f"{self.id}-{index}"

    def names_of(self, index: int) -> list[str]:
        return [name if len(self.prompts) == 1 else f"{name}-{index}" for name in self.names]


def make_id(prefix: str, asked: str | None) -> str:
    return f"{prefix}-{asked or secrets.token_hex(16)}"


def names_of(request_id: str | None, exchange: Exchange) -> tuple[str, ...]:
    """Returns the names by which a client may refer to the answer: its request_id, and the header X-Request-Id."""
    return (exchange.request_id,) if request_id is None else (request_id, exchange.request_id)


def engine_options(context: ServerContext, asked: SamplingFields, exchange: Exchange) -> GenerationOptions:
    return {
        "adapter": context.adapter_for(asked.model, asked),
        "priority": asked.priority or 0,
        "data_parallel_rank": asked.data_parallel_rank,
        "retain_kv": asked.retain_kv,
        "session": session_of(asked.prompt_cache_key, exchange),
        "retention": retention_of(asked.prompt_cache_retention),
        "kv_transfer_params": asked.kv_transfer_params,
        "owner": exchange.tenant,
        "trace_headers": exchange.trace_headers,
    }


def session_of(prompt_cache_key: str | None, exchange: Exchange) -> str | None:
    """The session that a request names: by the field, or by the header X-Session-Id. None: by neither."""
    if prompt_cache_key:
        return prompt_cache_key
    named = exchange.session
    if named is not None and not (0 < len(named) <= MAX_SESSION and named.isprintable()):
        problem = f"{named[:64]!r} is not the name of a session"
        raise refused("X-Session-Id", problem, f"1 to {MAX_SESSION} printable characters, or no such header")
    return named


def retention_of(asked: str | None) -> str | None:
    return None if asked is None else asked.replace("-", "_")


def asked_lengths(context: ServerContext, asked: int | None, otherwise: int | None) -> dict[str, int | None]:
    """Params: the request's fields over the model's defaults, or over the usual ones if the model's files
    have none."""
    if asked is None and sets_length(context.llm.source.generation_defaults):
        return {}
    return {"max_tokens": otherwise if asked is None else asked}


def check_token_limit(
    context: ServerContext,
    num_prompts: int,
    params: GenerationParams,
    num_prompt_tokens: int | None = None,
    field: str = "max_tokens",
) -> None:
    """The total work of a request is limited, so that a single one can't occupy the engine for hours. If the
    prompt's length is not known, max_tokens counts in full."""
    longest = context.max_model_len if params.max_length is None else min(params.max_length, context.max_model_len)
    room = longest - (num_prompt_tokens or 0)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if num_prompt_tokens is not None:
        max_tokens = min(max_tokens, room)
    if isinstance(params, BeamSearchParams):
        num_sequences, kind = params.beam_width, "beams"
    else:
        num_sequences, kind = params.n, "choices"
    asked = num_prompts * num_sequences * max_tokens
    limit = context.settings.max_request_tokens
    if asked > limit:
        raise refused(
            field,
            f"{num_prompts} prompts × {num_sequences} {kind} × {max_tokens} tokens is {asked}",
            f"at most {limit} in a request (--max-request-tokens)",
        )


async def collect(context: ServerContext, batch: Batch) -> list[RequestOutput]:
    """Returns the final output of every prompt, in order. If one fails, the others are aborted."""
    async with context.admit(len(batch.prompts), batch.owner):
        return await all_or_none([_final_output(context, batch, index) for index in range(len(batch.prompts))])


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all, in order. If one fails, the others are cancelled, and its error is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _final_output(context: ServerContext, batch: Batch, index: int) -> RequestOutput:
    final: RequestOutput | None = None
    async with aclosing(_generate(context, batch, index)) as outputs:
        async for output in outputs:
            final = output
    if final is None:
        raise generation_failed("The engine gave no output")
    if any(choice.finish_reason == "abort" for choice in final.outputs):
        raise shutting_down() if context.draining else aborted()
    return final


async def stream(context: ServerContext, batch: Batch) -> AsyncGenerator[Numbered, None]:
    """Yields new outputs of any prompt, as they come."""
    async with context.admit(len(batch.prompts), batch.owner):
        if len(batch.prompts) == 1:
            async with aclosing(_generate(context, batch, 0)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        async with aclosing(_merge(context, batch)) as merged:
            async for numbered in merged:
                yield numbered


async def _merge(context: ServerContext, batch: Batch) -> AsyncGenerator[Numbered, None]:
    """Runs one task per prompt. The short queue makes them wait for the reader; the engine's side merges pending
    outputs."""
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(maxsize=1)

    async def forward(index: int) -> None:
        try:
            async with aclosing(_generate(context, batch, index)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(index)) for index in range(len(batch.prompts))]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _generate(context: ServerContext, batch: Batch, index: int) -> AsyncGenerator[RequestOutput, None]:
    """Yields one prompt's outputs. ApiError if the engine fails it, RequestError if the engine refuses it."""
    try:
        async with aclosing(await _begin(context, batch, index)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise generation_failed(output.error)
                if batch.only_prompt:
                    _drop_answer(output)
                    if output.finished:  # a request whose token was not sent must not be continued
                        with suppress(UnknownParentError):  # an aborted one is not kept
                            await context.llm.forget(batch.request_id(index), batch.owner)
                yield output
    except RequestError as error:
        raise _as_in_body(error, batch, index) from None


async def _begin(context: ServerContext, batch: Batch, index: int) -> AsyncGenerator[RequestOutput, None]:
    for name in batch.names_of(index):
        context.shared.note_name(batch.owner, name, batch.request_id(index))
    if batch.begun is not None:
        outputs: AsyncGenerator[RequestOutput, None] = context.llm.engine.go_on(
            batch.begun.request, batch.begun.num_tokens
        )
        return outputs
    if batch.origin is None:
        return _answer(context, batch, index, batch.prompts[index])
    place = await find_place(context, batch.origin, batch.owner)
    if place is None:
        if batch.fallback is None:
            raise request_not_found(batch.origin.parent, "continuation_of")
        return _answer(context, batch, index, await batch.fallback(), in_place_of=batch.origin.parent)
    options: ContinuationOptions = {
        **batch.options,
        "choice": batch.origin.choice,
        "at": place.at,
        "wait": batch.origin.wait,
    }
    return context.llm.generate_continuation(
        place.parent_id, place.suffix, batch.params, batch.request_id(index), take=batch.take, **options
    )


def _answer(
    context: ServerContext, batch: Batch, index: int, prompt: EncodedPrompt, in_place_of: str | None = None
) -> AsyncGenerator[RequestOutput, None]:
    """Yields the outputs of an ordinary prompt, or of one `in_place_of` a parent that is unknown."""
    options: GenerationOptions = {**batch.options, "cache_salt": batch.cache_salt, "in_place_of": in_place_of}
    return context.llm.generate(prompt.as_prompt(), batch.params, batch.request_id(index), take=batch.take, **options)


def _drop_answer(output: RequestOutput) -> None:
    for choice in output.outputs:
        choice.text, choice.token_ids, choice.stop_reason = "", [], None
        choice.logprobs = None if choice.logprobs is None else []
        choice.finish_reason = choice.finish_reason and "length"


def _as_in_body(error: RequestError, batch: Batch, index: int) -> RequestError:
    """Errors about the prompt or the parent use the body's field names."""
    name = CONTINUATION_FIELDS.get(error.field) if batch.origin is not None else None
    if batch.origin is not None and error.field.startswith(SUFFIX):
        name = error.field.replace(SUFFIX, batch.origin.param, 1)
    field = error.field.partition("[")[0].partition(".")[0]
    if field in PROMPT_FIELDS and not (field == "multi_modal_data" and batch.has_media_field):
        name = batch.param if len(batch.prompts) == 1 else f"{batch.param}[{index}]"
    return error if name is None else type(error)(name, error.problem, error.expected)
