"""What the front end keeps of one request under way: text, tokens and log-probabilities of its choices, times, its end.

It takes in what the engine sent and makes what the caller gets. Which requests there are is the OutputProcessor's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ratoon.core.errors import RequestError
from ratoon.core.messages import Fault
from ratoon.core.outputs import CompletionOutput, Continuation, EmbeddingOutput, RequestMetrics, RequestOutput
from ratoon.core.params import PoolingParams, RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.core.wire import WireTensor
from ratoon.engine.detokenizer import Detokenizer, make_detokenizer
from ratoon.engine.logprobs import PromptLogprobsCollector, SampleLogprobsCollector
from ratoon.engine.roots import Root
from ratoon.engine.vectors import finish_vector

Output: TypeAlias = RequestOutput | EmbeddingOutput

ABORTED = "the request was aborted"


@dataclass(slots=True)
class ChoiceState:
    """One of a request's n choices."""

    index: int
    detokenizer: Detokenizer
    logprobs: SampleLogprobsCollector | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens_delivered: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take_tokens(self, output: EngineCoreOutput) -> int:
        """Add new tokens, up to a stop string, which ends the choice. How many were added."""
        token_ids = self.detokenizer.token_ids
        num_before = len(token_ids)
        stop_string = self.detokenizer.update(output.new_token_ids, output.finish_reason == FinishReason.STOP)
        num_new = len(token_ids) - num_before
        if output.new_logprobs is not None and self.logprobs is not None:
            self.logprobs.add(output.new_logprobs, num_new)
        if stop_string is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = stop_string
        return num_new

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        stop_string = self.detokenizer.finish()
        if stop_string is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.finish_reason = FinishReason.STOP
            self.stop_reason = stop_string

    def next_output(self, delta: bool) -> CompletionOutput:
        start = self.num_tokens_delivered if delta else 0
        token_ids = self.detokenizer.token_ids
        self.num_tokens_delivered = len(token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.next_text(self.finished, delta),
            token_ids=token_ids[start:],
            cumulative_logprob=None if self.logprobs is None else self.logprobs.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.logprobs[start:],
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )


@dataclass(slots=True)
class RequestState:
    request_id: str  # the internal one
    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    choices: list[ChoiceState]
    prompt_logprobs: PromptLogprobsCollector | None
    pooling_params: PoolingParams | None = None  # set: it ends with a vector; its one choice gets no token
    pooled: WireTensor | None = None
    prompt_logprobs_delivered: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None
    refusal: RequestError | None = None
    owner: str | None = None
    leased: bool = False  # its memory is to be kept for continuations
    cache_salt: str | None = None
    adapter: str | None = None
    parent_id: str | None = None  # of the request that it continues
    continuation: Continuation | None = None
    engine: int | None = None  # where it runs
    last_token_time: float | None = None
    num_new_tokens: int = 0  # in this step, over all choices
    changed: set[int] = field(default_factory=set)  # choices with something new in this step

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def finish_reason(self) -> FinishReason:
        """Of the whole request, once it has ended: the worst of its choices'."""
        return max(choice.finish_reason for choice in self.choices if choice.finish_reason is not None)

    def abort_id(self, choice: ChoiceState) -> str:
        """What the engine calls this choice alone."""
        return self.request_id if len(self.choices) == 1 else f"{self.request_id}#{choice.index}"

    def take(self, choice: ChoiceState, output: EngineCoreOutput, now: float) -> None:
        """Take in what a step brought for one choice that has not ended."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.inherited_from is not None and self.parent_id is not None and self.continuation is None:
            inherited = output.num_cached_tokens
            num_computed = len(self.prompt_token_ids) - inherited
            self.continuation = Continuation(self.parent_id, inherited, num_computed, str(output.inherited_from))
        if output.prompt_logprobs and self.prompt_logprobs is not None:
            self.prompt_logprobs.add(output.prompt_logprobs)
        if output.refusal is not None:
            self._note_error(_request_error(output.refusal))
        elif output.error is not None and self.error is None:
            self.error = output.error
        if output.pooled is not None:
            self.pooled = output.pooled
        if output.new_token_ids:
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
            num_new = choice.take_tokens(output)
            self.num_new_tokens += num_new
            self.metrics.num_generation_tokens += num_new
        if output.finish_reason is not None and not choice.finished:
            choice.stop_reason = output.stop_reason
            choice.finish(output.finish_reason)
        if output.new_token_ids or choice.finished:
            self.changed.add(choice.index)

    def _note_error(self, error: Exception) -> None:
        if self.error is None:
            self.error = str(error)
            self.refusal = error if isinstance(error, RequestError) else None

    def end(self, reason: FinishReason, error: Exception | None) -> None:
        """End all choices that have not ended."""
        if error is not None:
            self._note_error(error)
        for choice in self.choices:
            if not choice.finished:
                choice.finish(reason)
                self.changed.add(choice.index)

    def end_choices_that_never_began(self) -> None:
        """Choices are forked from the first when the prompt is done. If that failed before, there will be no others."""
        first = self.choices[0]
        if first.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT) or first.detokenizer.token_ids:
            return
        for choice in self.choices[1:]:
            if not choice.finished and not choice.detokenizer.token_ids:
                choice.finish(first.finish_reason)
                self.changed.add(choice.index)

    def next_output(self, finished: bool) -> Output | None:
        """What the caller gets for what changed, if there is something to give."""
        if self.pooling_params is not None:
            return self._embedding_output(self.pooling_params) if finished else None
        kind = self.params.output_kind
        if not self.changed or (kind == RequestOutputKind.FINAL_ONLY and not finished):
            self.changed.clear()
            return None
        delta = kind == RequestOutputKind.DELTA
        outputs = [choice.next_output(delta) for choice in self.choices if not delta or choice.index in self.changed]
        self.changed.clear()
        return self._request_output(outputs, finished, self._next_prompt_logprobs(delta))

    def last_output(self) -> Output:
        """The end of a request that could not be handled here: `error` is set. Nothing that may fail again is tried."""
        for choice in self.choices:
            if choice.finish_reason is None or choice.index in self.changed:
                choice.finish_reason = FinishReason.ERROR
        if self.pooling_params is not None:
            return self._embedding_output(None)
        delta = self.params.output_kind == RequestOutputKind.DELTA
        outputs = [
            CompletionOutput(
                index=choice.index,
                text="" if delta else choice.detokenizer.text,
                token_ids=[] if delta else choice.detokenizer.token_ids.copy(),
                finish_reason=str(choice.finish_reason),
            )
            for choice in self.choices
        ]
        return self._request_output(outputs, finished=True)

    def _next_prompt_logprobs(self, delta: bool) -> Any:
        if self.prompt_logprobs is None or (delta and self.prompt_logprobs_delivered):
            return None
        self.prompt_logprobs_delivered = True
        return self.prompt_logprobs.logprobs

    def _request_output(
        self, outputs: list[CompletionOutput], finished: bool, prompt_logprobs: Any = None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.external_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            refusal=self.refusal,
            continuation=self.continuation,
        )

    def as_root(self) -> Root | None:
        """What can be continued of it, now that it has ended; None: it failed, was taken back, or made a vector."""
        ended_well = all(choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for choice in self.choices)
        if self.pooling_params is not None or not ended_well:
            return None
        return self.snapshot()

    def snapshot(self) -> Root:
        """As far as it has come."""
        return Root(
            request_id=self.external_id,
            internal_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            choices=[list(choice.detokenizer.token_ids) for choice in self.choices],
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            owner=self.owner,
            engine=self.engine,
            leased=self.leased,
        )

    def _embedding_output(self, params: PoolingParams | None) -> EmbeddingOutput:
        """Without params, or where the engine sent no vector, it has none."""
        embedding = None if params is None or self.pooled is None else finish_vector(self.pooled, params)
        error = self.error
        if embedding is None and error is None:
            aborted = self.choices[0].finish_reason == FinishReason.ABORT
            error = ABORTED if aborted else "the engine sent no vector"
        return EmbeddingOutput(
            request_id=self.external_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            embedding=embedding,
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=self.metrics,
            error=error,
            refusal=self.refusal,
        )


def make_request_state(request: EngineCoreRequest, prompt: str | None, tokenizer: Any | None) -> RequestState:
    params = request.sampling_params
    if request.pooling_params is not None:
        choices = [ChoiceState(0, Detokenizer(), None)]
    else:
        choices = [
            ChoiceState(
                index=index,
                detokenizer=make_detokenizer(tokenizer, request.prompt_token_ids, params),
                logprobs=None if params.logprobs is None else SampleLogprobsCollector(tokenizer),
            )
            for index in range(params.n)
        ]
    return RequestState(
        request_id=request.request_id,
        external_id=request.external_id if request.external_id is not None else request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        params=params,
        metrics=RequestMetrics(arrival_time=request.arrival_time),
        choices=choices,
        prompt_logprobs=None if params.prompt_logprobs is None else PromptLogprobsCollector(tokenizer),
        pooling_params=request.pooling_params,
        owner=request.owner,
        leased=request.retain_kv is not None,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        parent_id=request.parent_id,
    )


def _request_error(refusal: Fault) -> RequestError:
    return RequestError(refusal.subject, refusal.problem, refusal.expected)
