"""Engine outputs to what callers get: text, stop strings, log-probabilities, choices put together, times.

It knows every request that is under way on this side of the engine. It never talks to the engine: what must be ended
there, because a stop string ended it here, it returns as ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ratoon.core.errors import RequestError
from ratoon.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ratoon.core.params import RequestOutputKind, SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from ratoon.engine.detokenizer import Detokenizer, make_detokenizer
from ratoon.engine.logprobs import PromptLogprobsCollector, SampleLogprobsCollector


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
    prompt_logprobs_delivered: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None
    changed: set[int] = field(default_factory=set)  # choices with something new in this step

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def abort_id(self, choice: ChoiceState) -> str:
        """What the engine calls this choice alone."""
        return self.request_id if len(self.choices) == 1 else f"{self.request_id}#{choice.index}"


class OutputProcessor:
    def __init__(self, tokenizer: Any | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._states: dict[str, RequestState] = {}  # by internal id
        self._internal_ids: dict[str, str] = {}  # by the caller's id

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        external_id = request.external_id if request.external_id is not None else request.request_id
        if external_id in self._internal_ids:
            raise RequestError("request_id", f"{external_id!r} is in use", "an id that no unfinished request has")
        params = request.sampling_params
        choices = [
            ChoiceState(
                index=index,
                detokenizer=make_detokenizer(self._tokenizer, request.prompt_token_ids, params),
                logprobs=None if params.logprobs is None else SampleLogprobsCollector(self._tokenizer),
            )
            for index in range(params.n)
        ]
        self._internal_ids[external_id] = request.request_id
        self._states[request.request_id] = RequestState(
            request_id=request.request_id,
            external_id=external_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            params=params,
            metrics=RequestMetrics(arrival_time=request.arrival_time),
            choices=choices,
            prompt_logprobs=None if params.prompt_logprobs is None else PromptLogprobsCollector(self._tokenizer),
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def num_unfinished_requests(self) -> int:
        return len(self._states)

    def internal_id(self, external_id: str) -> str | None:
        return self._internal_ids.get(external_id)

    def process_outputs(self, outputs: EngineCoreOutputs) -> tuple[list[RequestOutput], list[str]]:
        """What callers get for this step, and the ids that the engine should abort: a stop string ended them."""
        now = self._clock()
        touched: dict[str, RequestState] = {}
        to_abort: list[str] = []
        for output in outputs.outputs:
            state = self._states.get(output.request_id)
            # The engine may have been a step ahead of an abort: what it still sends is nobody's.
            if state is None or output.choice >= len(state.choices) or state.choices[output.choice].finished:
                continue
            touched[state.request_id] = state
            choice = state.choices[output.choice]
            self._update(state, choice, output, now)
            if choice.finished and not output.finished:
                to_abort.append(state.abort_id(choice))
        results = []
        for state in touched.values():
            _end_choices_that_never_began(state)
            result = self._deliver(state, now)
            if result is not None:
                results.append(result)
        return results, to_abort

    def abort_requests(self, external_ids: Iterable[str]) -> tuple[list[RequestOutput], list[str]]:
        """End requests here. Returns their last outputs, and the ids to abort in the engine."""
        return self._end(external_ids, FinishReason.ABORT, None)

    def fail_request(self, external_id: str, error: str) -> RequestOutput | None:
        """End a request that the engine could not take or carry out."""
        results, _ = self._end([external_id], FinishReason.ERROR, error)
        return results[0] if results else None

    def _end(
        self, external_ids: Iterable[str], reason: FinishReason, error: str | None
    ) -> tuple[list[RequestOutput], list[str]]:
        results, internal_ids = [], []
        now = self._clock()
        for external_id in external_ids:
            state = self._states.get(self._internal_ids.get(external_id, ""))
            if state is None:
                continue
            state.error = state.error or error
            for choice in state.choices:
                if not choice.finished:
                    _finish(choice, reason)
                    state.changed.add(choice.index)
            internal_ids.append(state.request_id)
            result = self._deliver(state, now)
            if result is not None:
                results.append(result)
        return results, internal_ids

    def _update(self, state: RequestState, choice: ChoiceState, output: EngineCoreOutput, now: float) -> None:
        if state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs and state.prompt_logprobs is not None:
            state.prompt_logprobs.add(output.prompt_logprobs)
        if output.error is not None and state.error is None:
            state.error = output.error
        if output.new_token_ids:
            self._take_tokens(state, choice, output, now)
        if output.finish_reason is not None and not choice.finished:
            choice.stop_reason = output.stop_reason
            _finish(choice, output.finish_reason)
        if output.new_token_ids or choice.finished:
            state.changed.add(choice.index)

    def _take_tokens(self, state: RequestState, choice: ChoiceState, output: EngineCoreOutput, now: float) -> None:
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        num_before = len(choice.detokenizer.token_ids)
        ended_by_token = output.finish_reason == FinishReason.STOP
        stop_string = choice.detokenizer.update(output.new_token_ids, ended_by_token)
        num_new = len(choice.detokenizer.token_ids) - num_before
        state.metrics.num_generation_tokens += num_new
        if output.new_logprobs is not None and choice.logprobs is not None:
            choice.logprobs.add(output.new_logprobs, num_new)
        if stop_string is not None:
            choice.finish_reason = FinishReason.STOP
            choice.stop_reason = stop_string

    def _deliver(self, state: RequestState, now: float) -> RequestOutput | None:
        """The caller's output for what changed, if there is one to give; forget the request once it is finished."""
        finished = state.finished
        if finished:
            state.metrics.finished_time = now
            del self._states[state.request_id]
            del self._internal_ids[state.external_id]
        kind = state.params.output_kind
        if not state.changed or (kind == RequestOutputKind.FINAL_ONLY and not finished):
            state.changed.clear()
            return None
        delta = kind == RequestOutputKind.DELTA
        shown = [choice for choice in state.choices if not delta or choice.index in state.changed]
        state.changed.clear()
        prompt_logprobs = None
        if state.prompt_logprobs is not None and not (delta and state.prompt_logprobs_delivered):
            prompt_logprobs = state.prompt_logprobs.logprobs
            state.prompt_logprobs_delivered = True
        return RequestOutput(
            request_id=state.external_id,
            prompt=state.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[_completion_output(choice, delta) for choice in shown],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
        )


def _finish(choice: ChoiceState, reason: FinishReason) -> None:
    choice.finish_reason = reason
    stop_string = choice.detokenizer.finish()
    if stop_string is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
        choice.finish_reason = FinishReason.STOP
        choice.stop_reason = stop_string


def _end_choices_that_never_began(state: RequestState) -> None:
    """Choices are forked from the first when the prompt is done. If that one failed before, there will be no others."""
    first = state.choices[0]
    if first.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT) or first.detokenizer.token_ids:
        return
    for choice in state.choices[1:]:
        if not choice.finished and not choice.detokenizer.token_ids:
            _finish(choice, first.finish_reason)
            state.changed.add(choice.index)


def _completion_output(choice: ChoiceState, delta: bool) -> CompletionOutput:
    start = choice.num_tokens_delivered if delta else 0
    choice.num_tokens_delivered = len(choice.detokenizer.token_ids)
    return CompletionOutput(
        index=choice.index,
        text=choice.detokenizer.next_text(choice.finished, delta),
        token_ids=choice.detokenizer.token_ids[start:],
        cumulative_logprob=None if choice.logprobs is None else choice.logprobs.cumulative_logprob,
        logprobs=None if choice.logprobs is None else choice.logprobs.logprobs[start:],
        finish_reason=None if choice.finish_reason is None else str(choice.finish_reason),
        stop_reason=choice.stop_reason,
    )
