"""From a checked request to its answer, whole or streamed: what completions and chat have in common.

The head of an answer, its chunks, its usage, its hidden states, and the progress of a beam search.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ratoon.api.hidden_states import facts, raw_bytes
from ratoon.api.server.context import ServerContext
from ratoon.api.server.errors import as_api_error, generation_failed
from ratoon.api.server.exchange import BodyWriter, exchange_of
from ratoon.api.server.generation import Batch, collect, stream
from ratoon.api.server.prompts import EncodedPrompt
from ratoon.api.server.protocol.sampling import SamplingFields
from ratoon.api.server.responses import (
    Base64,
    EventStream,
    EventTemplate,
    event,
    event_parts,
    large_binary_response,
    large_response,
    slices,
)
from ratoon.api.server.threads import LONG_TEXT, off_loop
from ratoon.core.outputs import CompletionOutput, HiddenStatesOutput, RequestMetrics, RequestOutput
from ratoon.core.params import BeamSearchParams, SamplingParams


class SearchProgress:
    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()  # prompts and choices that were sent
        self._best: dict[int, str] = {}  # by prompt

    def take(self, index: int, output: RequestOutput) -> CompletionOutput | None:
        """Keeps in an output of prompt `index` only the choices that have ended and were not sent before. Returns the
        best text so far, if it has changed."""
        best = next((choice for choice in output.outputs if not choice.finished), None)
        output.outputs = [
            choice for choice in output.outputs if choice.finished and (index, choice.index) not in self._told
        ]
        self._told.update((index, choice.index) for choice in output.outputs)
        if best is None or best.text == self._best.get(index):
            return None
        self._best[index] = best.text
        return best


def figures(choice: CompletionOutput) -> dict[str, Any]:
    """Returns the score of a text of a beam search; empty for sampled ones."""
    if choice.score is None:
        return {}
    return {"score": choice.score, "cumulative_logprob": choice.cumulative_logprob}


class PromptTokensDetails(msgspec.Struct, gc=False):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, gc=False):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


class Usage(msgspec.Struct, omit_defaults=True, gc=False):
    """The token counts of an answer. A struct, because a stream may have one in every chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # None: nothing was drafted


class UsageCounter:
    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        self._num_prompt_tokens = [len(prompt.token_ids) for prompt in prompts]
        self.num_completion_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)
        self._metrics: list[RequestMetrics | None] = [None] * len(prompts)

    def add(self, index: int, output: RequestOutput) -> None:
        """Counts the new tokens of an output."""
        self._num_cached_tokens[index] = output.num_cached_tokens or 0
        self._metrics[index] = output.metrics
        # For continuations and decoder prompts, known only now.
        prompts = (output.prompt_token_ids, output.encoder_prompt_token_ids)
        self._num_prompt_tokens[index] = sum(len(token_ids or ()) for token_ids in prompts)
        for choice in output.outputs:
            self.num_completion_tokens += len(choice.token_ids)

    def usage(self) -> Usage:
        num_prompt_tokens, num_completion_tokens = sum(self._num_prompt_tokens), self.num_completion_tokens
        details = PromptTokensDetails(sum(self._num_cached_tokens))
        total = num_prompt_tokens + num_completion_tokens
        return Usage(num_prompt_tokens, num_completion_tokens, total, details, self._draft_details())

    def drafts(self) -> dict[str, int]:
        """Returns the counts of drafts under their names in a usage, for protocols that know no predictions; empty if
        nothing was drafted."""
        details = self._draft_details()
        if details is None:
            return {}
        return {"draft_tokens": details.draft_tokens, "accepted_draft_tokens": details.accepted_draft_tokens}

    def _draft_details(self) -> CompletionTokensDetails | None:
        drafted = [metrics for metrics in self._metrics if metrics is not None and metrics.num_draft_tokens]
        if not drafted:
            return None
        return CompletionTokensDetails(
            sum(metrics.num_accepted_prediction_tokens for metrics in drafted),
            sum(metrics.num_rejected_prediction_tokens for metrics in drafted),
            sum(metrics.num_draft_tokens for metrics in drafted),
            sum(metrics.num_accepted_tokens for metrics in drafted),
        )


def content(output: HiddenStatesOutput) -> dict[str, Any]:
    return {**facts(output), "data": Base64(raw_bytes(output.tensor))}


def content_or_error(output: HiddenStatesOutput) -> dict[str, Any]:
    """Returns the error in place of states that could not be read; the text is returned nevertheless."""
    if output.refusal is not None:
        return as_api_error(output.refusal).as_dict()
    if output.error is not None:
        return generation_failed(output.error).as_dict()
    return content(output)


class Renderer(ABC):
    """Builds one request's answer. Either `whole` is called, once, or `chunks` for every output, in order."""

    WHOLE: ClassVar[str]  # the `object` of an answer, and of a chunk
    CHUNK: ClassVar[str]

    def __init__(self, context: ServerContext, asked: SamplingFields, batch: Batch) -> None:
        self.context = context
        self.batch = batch
        self.counter = UsageCounter(batch.prompts)
        self.num_choices = asked.num_choices()
        self.return_token_ids = bool(asked.return_token_ids)
        self.has_logprobs = batch.params.logprobs is not None if isinstance(batch.params, SamplingParams) else False
        options = asked.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self._usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._continuation_told = False
        self._search = SearchProgress() if isinstance(batch.params, BeamSearchParams) else None
        self._head = {"id": batch.id, "created": int(time.time()), "model": asked.model}
        self._templates: dict[int, EventTemplate] = {}  # by the choice's index in the answer

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for index, output in enumerate(outputs):
            self.counter.add(index, output)
        content = self.whole_body(outputs)
        for index, output in enumerate(outputs):
            self._put_in(content, self._hidden_states(index, output))
        body = {**content, "usage": self.counter.usage(), **self._about_continuation(outputs[0]), **_sent(outputs[0])}
        return {**self._head, "object": self.WHOLE, **body}

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Returns chunks for what is new in prompt `index`, a choice each."""
        best = None if self._search is None else self._search.take(index, output)
        self.counter.add(index, output)
        states = self._hidden_states(index, output)
        for body in self.chunk_bodies(index, output):
            self._put_in(body, states)
            yield self._chunk({**body, **self._about_continuation(output), **_sent(output)})
        for place, entry in states.items():  # of choices that ended before the last one
            yield self._chunk({"choices": [{**self.plain_choice(place), "hidden_states": entry}]})
        if best is not None:
            choice = {**self.plain_choice(index * self.num_choices), **figures(best), "best_so_far": best.text}
            yield self._chunk({"choices": [choice], **self._about_continuation(output)})

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Returns the same chunks, encoded as events."""
        pairs = []
        for choice in output.outputs:
            template = self._templates.get(index * self.num_choices + choice.index)
            if template is None or choice.finish_reason is not None:
                body = b"".join([event(chunk) for chunk in self.chunks(index, output)])
                self._prepare_templates(index, output)
                return body
            pairs.append((template, choice))
        for _, choice in pairs:
            self.counter.num_completion_tokens += len(choice.token_ids)
        usage = self.counter.usage() if self._usage_in_chunks else None
        return b"".join([template.event(choice.text, usage) for template, choice in pairs if choice.text])

    def _prepare_templates(self, index: int, output: RequestOutput) -> None:
        """Once a choice has begun, its chunks differ in text and usage alone, unless they have further fields."""
        is_told = output.continuation is None or self._continuation_told
        if self._search is not None or self.return_token_ids or not is_told:
            return
        for choice in output.outputs:
            place = index * self.num_choices + choice.index
            if choice.logprobs is None and place not in self._templates and self.has_begun(place):
                mark = secrets.token_hex(16)
                chunk = self._chunk({"choices": [self.plain_choice(place, mark)]})
                self._templates[place] = EventTemplate(chunk, mark, "usage" if self._usage_in_chunks else None)

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self.CHUNK, "choices": [], "usage": self.counter.usage()}

    def _chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.CHUNK, **body}
        if self._usage_in_chunks:
            chunk["usage"] = self.counter.usage()
        elif self.include_usage:
            chunk["usage"] = None
        return chunk

    def _hidden_states(self, index: int, output: RequestOutput) -> dict[int, dict[str, Any]]:
        """Returns hidden states by the choices' indices. They come with a prompt's last output, for all of its
        choices."""
        first = index * self.num_choices
        return {first + choice: content_or_error(states) for choice, states in enumerate(output.hidden_states or ())}

    @staticmethod
    def _put_in(body: dict[str, Any], states: dict[int, dict[str, Any]]) -> None:
        """Attaches hidden states to the choices that end in this body."""
        for choice in body["choices"]:
            if choice["finish_reason"] is not None and choice["index"] in states:
                choice["hidden_states"] = states.pop(choice["index"])

    def _about_continuation(self, output: RequestOutput) -> dict[str, Any]:
        """Says how a continuation began: in its whole answer, or in the first chunk."""
        if output.continuation is None or self._continuation_told:
            return {}
        self._continuation_told = True
        return {"continuation": asdict(output.continuation)}

    def is_worth_sending(self, choice: CompletionOutput) -> bool:
        """Text is held back while it may become a stop string or is part of a character: then there is no chunk."""
        return bool(choice.text) or choice.finished or self.return_token_ids or choice.logprobs is not None

    @abstractmethod
    def whole_body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns `choices`, and further fields of this kind of answer."""

    @abstractmethod
    def chunk_bodies(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Returns the bodies of chunks, a choice each."""

    @abstractmethod
    def plain_choice(self, place: int, text: str = "") -> dict[str, Any]:
        """Returns the choice with this index, in a chunk that adds nothing but text."""

    @abstractmethod
    def has_begun(self, place: int) -> bool:
        """Whether the first chunk of this choice was built, which may have fields that later ones lack."""


async def answer_whole(request: Request, renderer: Renderer) -> Response:
    outputs = await collect(renderer.context, renderer.batch)
    has_states = any(output.hidden_states is not None for output in outputs)
    respond = large_binary_response if has_states else large_response
    return await respond(request, answer_size(outputs), lambda: renderer.whole(outputs))


def answer_size(outputs: Sequence[RequestOutput]) -> int:
    """Returns roughly what it takes to build and encode a whole answer, as if in characters of a text: reading calls
    takes as long as tokenising, and an entry of the log-probabilities as long as some tens of characters."""
    size = 0
    for output in outputs:
        size += ENTRY_SIZE * _num_entries(output.prompt_logprobs)
        for choice in output.outputs:
            size += len(choice.text) + len(choice.token_ids) + ENTRY_SIZE * _num_entries(choice.logprobs)
    return size


ENTRY_SIZE = 32


def _num_entries(logprobs: Sequence[Any] | None) -> int:
    """Counts the entries of all positions: they have as many alternatives each as the last one."""
    return len(logprobs) * len(logprobs[-1] or ()) if logprobs else 0


async def answer_stream(request: Request, renderer: Renderer) -> Response:
    """Waits for the first events: errors until then get an HTTP status instead of an event."""
    exchange, batch = exchange_of(request.scope), renderer.batch
    if exchange.writer is not None and len(batch.prompts) == 1 and not batch.only_prompt:
        batch.take = partial(_write, exchange.writer, renderer)
    events = _events(renderer)
    first = await anext(events, b"")
    return EventStream(first, events, exchange.headers())


def _write(writer: BodyWriter, renderer: Renderer, output: RequestOutput) -> bool:
    """Send the events of an output for which the stream's task waits, without waking it. False: its task must do it,
    because the response has not begun, or has to wait for the client, or because it takes long."""
    if not writer.is_ready or (renderer.has_logprobs and answer_size([output]) >= LONG_TEXT):
        return False
    if body := renderer.events(0, output):
        writer.write(body)
    return True


async def _events(renderer: Renderer) -> AsyncGenerator[bytes, None]:
    """Yields encoded events. All chunks of one output are sent together: they come from one step. Only those with
    hidden states may be large enough to be sent in slices."""
    async with aclosing(stream(renderer.context, renderer.batch)) as outputs:
        async for index, output in outputs:
            if output.hidden_states is not None:
                chunks = renderer.chunks(index, output)
                for piece in slices(part for chunk in chunks for part in event_parts(chunk)):
                    yield piece
                    await asyncio.sleep(0)
            elif body := await off_loop(answer_size([output]), partial(renderer.events, index, output)):
                yield body
    if renderer.include_usage:
        yield event(renderer.usage_chunk())


def _sent(output: RequestOutput) -> dict[str, Any]:
    """Returns the fields for another engine, which goes on with a request that has ended here."""
    return {} if output.kv_transfer_params is None else {"kv_transfer_params": output.kv_transfer_params}
