"""The front end's state of one running request: its choices, times, source of its prefix, and end.

It processes the engine's outputs and builds the caller's. The OutputProcessor has all requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ratoon.core.adapters import Adapter
from ratoon.core.encoder import EncoderInput
from ratoon.core.errors import RequestError
from ratoon.core.faults import refusal_of
from ratoon.core.media import MediaFeature, RopePositions
from ratoon.core.outputs import (
    CompletionOutput,
    Continuation,
    HiddenStatesOutput,
    RequestMetrics,
    RequestOutput,
)
from ratoon.core.params import (
    BeamSearchParams,
    GenerationParams,
    HiddenStatesParams,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from ratoon.core.readings import awaits_count
from ratoon.core.request import (
    CheckedDrafts,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    Extraction,
    FinishReason,
    InheritedFrom,
    branch_id_of,
)
from ratoon.core.speculation import PREDICTION
from ratoon.core.structured import StructuredOutput
from ratoon.engine.input.hidden_states import Selection
from ratoon.engine.output.answers import HiddenStatesAnswer, Output, PendingAnswer, VectorAnswer
from ratoon.engine.output.choice_state import ChoiceState, make_choices
from ratoon.engine.output.logprobs import PromptLogprobsCollector
from ratoon.engine.output.roots import Root

__all__ = ["Output", "Reading", "RequestState", "make_request_state"]


@dataclass(slots=True)
class Reading:
    """The hidden states of choices that have ended: those received, and the readings that still run."""

    states: dict[int, HiddenStatesOutput] = field(default_factory=dict)  # by choice
    readers: dict[str, RequestState] = field(default_factory=dict)  # by internal id


@dataclass(slots=True)
class RequestState:
    request_id: str  # the internal one
    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: GenerationParams | None  # None: there is an `answer`
    metrics: RequestMetrics
    choices: list[ChoiceState]
    prompt_logprobs: PromptLogprobsCollector | None
    encoder_prompt: str | None = None  # of an encoder-decoder model, as is the next; `prompt` is then the decoder's
    encoder_input: EncoderInput | None = None
    mm_features: list[MediaFeature] = field(default_factory=list)
    rope: RopePositions | None = None
    answer: PendingAnswer | None = None  # set: its result is not text; its one choice gets no token
    reading: Reading | None = None  # set once a choice has ended, where it asked for hidden states
    reads: tuple[RequestState, int] | None = None  # set: this is read for a choice of another request
    beam_search: bool = False  # its choices are known when it ends; before, there is the best text so far
    prompt_logprobs_delivered: bool = False
    num_cached_tokens: int | None = None
    error: str | None = None
    refusal: RequestError | None = None
    owner: str | None = None
    retain_kv: float | None = None  # seconds that its memory is to be kept for continuations
    session: str | None = None
    retention: str | None = None
    cache_salt: str | None = None
    adapter: Adapter | None = None
    parent_id: str | None = None  # of the request that it continues
    is_fallback: bool = False  # that request is forgotten, and the prompt stands in its place
    continuation: Continuation | None = None
    engine: int | None = None  # where it runs
    last_token_time: float | None = None
    got_tokens: bool = False  # in this step
    num_new_tokens: int = 0  # in this step, over all choices
    changed: set[int] = field(default_factory=set)  # choices with something new in this step
    trace_headers: dict[str, str] | None = None  # set, perhaps empty: it is traced, and its events are kept
    events: list[EngineCoreEvent] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    prompt_counted: bool = False  # among the tokens of the throughput log

    @property
    def finished(self) -> bool:
        if len(self.choices) == 1:  # most have one, and this is asked for every token
            return self.choices[0].finish_reason is not None
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def output_kind(self) -> RequestOutputKind:
        return RequestOutputKind.FINAL_ONLY if self.params is None else self.params.output_kind

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the whole request has ended: the worst of its choices'."""
        return max(choice.finish_reason for choice in self.choices if choice.finish_reason is not None)

    @property
    def ended_well(self) -> bool:
        return all(choice.ended_well for choice in self.choices)

    @property
    def states_asked(self) -> HiddenStatesParams | None:
        """The hidden states that come with its texts."""
        return None if self.params is None else self.params.return_hidden_states

    @property
    def is_read(self) -> bool:
        """Whether hidden states of a choice that has ended are still to come."""
        return self.reading is not None and bool(self.reading.readers)

    def tell_stop(self, choice: ChoiceState, ended_in_engine: bool, stopped: dict[str, int | None]) -> None:
        """Note for the engine that a choice ended at a stop string, and, before hidden states are read, how many of its
        tokens count."""
        is_read = self.states_asked is not None and choice.ended_well
        if not ended_in_engine or (is_read and awaits_count(self.params)):
            num_tokens = len(choice.detokenizer.token_ids) if is_read else None
            stopped[branch_id_of(self.request_id, choice.index)] = num_tokens

    def take(self, choice: ChoiceState, output: EngineCoreOutput, now: float, sampled: float | None = None) -> None:
        """Take in what a step, which ended at `sampled`, brought for one choice that has not ended."""
        if output.events is not None:
            self._take_events(output.events, now)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if self.parent_id is not None and self.continuation is None:
            self.continuation = self._how_it_began(self.parent_id, output)
        if output.prompt_logprobs and self.prompt_logprobs is not None:
            self.prompt_logprobs.add(output.prompt_logprobs)
        if output.refusal is not None:
            self._note_error(refusal_of(output.refusal))
        elif output.error is not None and self.error is None:
            self.error = output.error
        if self.answer is not None:
            self.answer.take(output)
        if output.checked is not None:
            self._take_checked(output.checked)
        if output.num_texts is not None:
            del self.choices[output.num_texts :]
        if output.new_token_ids:
            self._take_tokens(choice, output, now)
            self._note_sampled(now if sampled is None else sampled, now)
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        if output.finish_reason is not None and not choice.finished:
            choice.stop_reason = output.stop_reason
            choice.finish(output.finish_reason)
        if output.new_token_ids or choice.finished:
            self.changed.add(choice.index)

    def _how_it_began(self, parent_id: str, output: EngineCoreOutput) -> Continuation | None:
        """Known with the first token."""
        inherited, source = output.num_cached_tokens, output.inherited_from
        if self.is_fallback and output.new_token_ids:
            source = InheritedFrom.PREFIX_CACHE if inherited else InheritedFrom.RECOMPUTED
        if source is None:
            return None
        num_computed = len(self.prompt_token_ids) - inherited
        return Continuation(parent_id, inherited, num_computed, str(source), self.is_fallback)

    def _take_tokens(self, choice: ChoiceState, output: EngineCoreOutput, now: float) -> None:
        self.got_tokens = True
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if output.replaces:
            assert self.params is not None
            choice.replace_tokens(output, self.params.all_stop_token_ids or ())
            num_new = len(output.new_token_ids) if output.finished else 0  # before, they may still be taken back
        else:
            num_new = choice.add_tokens(output)
        self.num_new_tokens += num_new
        self.metrics.num_generation_tokens += num_new

    def _take_checked(self, checked: CheckedDrafts) -> None:
        metrics = self.metrics
        metrics.num_draft_tokens += checked.num_drafted
        metrics.num_accepted_tokens += checked.num_accepted
        if checked.source == PREDICTION:
            metrics.num_accepted_prediction_tokens += checked.num_accepted
            metrics.num_rejected_prediction_tokens += checked.num_drafted - checked.num_accepted

    def _take_events(self, events: list[EngineCoreEvent], now: float) -> None:
        """Takes each event once: what an engine that had to begin anew tells again changes nothing."""
        metrics = self.metrics
        for event in events:
            time = min(max(event.timestamp, metrics.arrival_time), now)
            if event.type == EngineCoreEventType.QUEUED and metrics.queued_time is None:
                metrics.queued_time = time
            elif event.type == EngineCoreEventType.SCHEDULED and metrics.scheduled_time is None:
                metrics.scheduled_time = time
            elif event.type == EngineCoreEventType.PREEMPTED:
                metrics.num_preemptions += 1
        if self.trace_headers is not None:
            self.events += events

    def _note_sampled(self, sampled: float, now: float) -> None:
        metrics = self.metrics
        earliest = metrics.arrival_time if metrics.scheduled_time is None else metrics.scheduled_time
        metrics.sampled_last_time = min(max(sampled, earliest), now)
        if metrics.sampled_first_time is None:
            metrics.sampled_first_time = metrics.sampled_last_time

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
        """Choices are forked from the first when the prompt is done, or found by a beam search when that ends. If it
        failed before, there will be no others."""
        first = self.choices[0]
        if first.finish_reason is None:
            return
        begun = bool(first.detokenizer.token_ids) and not self.beam_search
        if begun or first.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
            return
        for choice in self.choices[1:]:
            if not choice.finished and not choice.detokenizer.token_ids:
                choice.finish(first.finish_reason)
                self.changed.add(choice.index)

    def next_output(self, finished: bool) -> Output | None:
        """What the caller gets for what changed, if there is something to give."""
        if self.answer is not None:
            return self.answer.output(self) if finished else None
        kind = self.output_kind
        if not self.changed or (kind == RequestOutputKind.FINAL_ONLY and not finished):
            self.changed.clear()
            return None
        delta = kind == RequestOutputKind.DELTA
        only_changed = delta or (self.beam_search and not finished)
        outputs = [
            choice.next_output(delta) for choice in self.choices if not only_changed or choice.index in self.changed
        ]
        self.changed.clear()
        return self._request_output(outputs, finished, self._next_prompt_logprobs(delta))

    def last_output(self) -> Output:
        """The end of a request that could not be handled here: `error` is set. Nothing that may fail again is tried."""
        for choice in self.choices:
            if choice.finish_reason is None or choice.index in self.changed:
                choice.finish_reason = FinishReason.ERROR
        if self.answer is not None:
            return self.answer.output(self)  # no more than the error
        delta = self.output_kind == RequestOutputKind.DELTA
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
            hidden_states=self._hidden_states() if finished else None,
            encoder_prompt=self.encoder_prompt,
            encoder_prompt_token_ids=None if self.encoder_input is None else self.encoder_input.token_ids,
            owner=self.owner,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _hidden_states(self) -> list[HiddenStatesOutput] | None:
        if self.reading is None:
            return None
        return [self.reading.states[choice.index] for choice in self.choices]

    def as_root(self) -> Root | None:
        """What can be continued of it, now that it has ended; None: it failed, was taken back, or has no text."""
        return self.snapshot() if self.answer is None and self.ended_well else None

    def snapshot(self) -> Root:
        """Returns the request as a root, as far as it has come."""
        return Root(
            request_id=self.external_id,
            internal_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            choices=[list(choice.detokenizer.token_ids) for choice in self.choices],
            encoder_input=self.encoder_input,
            mm_features=self.mm_features,
            rope=self.rope,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            owner=self.owner,
            engine=self.engine,
            leased_until=None if self.retain_kv is None else time.time() + self.retain_kv,
            session=self.session,
            retention=self.retention,
            searching=self.beam_search and not self.finished,
            structured_output=self._structured_output(),
        )

    def _structured_output(self) -> StructuredOutput | None:
        """The structured output, with the place where it begins, for continuations."""
        asked = None if self.params is None else self.params.structured_output
        if asked is None or asked.first_token is not None:
            return asked
        return msgspec.structs.replace(asked, first_token=len(self.prompt_token_ids))


def make_request_state(
    request: EngineCoreRequest,
    prompt: str | None,
    tokenizer: Any | None,
    selection: Selection | None = None,
    encoder_prompt: str | None = None,
) -> RequestState:
    """`selection` is what an extraction was made from; the prompts are texts, for reading."""
    params = request.generation_params
    prompt_logprobs = None
    if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
        prompt_logprobs = PromptLogprobsCollector(tokenizer)
    answer: PendingAnswer | None = None
    if isinstance(request.params, PoolingParams):
        answer = VectorAnswer(request.params)
    elif selection is not None:
        answer = HiddenStatesAnswer(selection, _sequence_read(request))
    return RequestState(
        request_id=request.request_id,
        external_id=request.external_id if request.external_id is not None else request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        params=params,
        metrics=RequestMetrics(arrival_time=request.arrival_time),
        choices=make_choices(request, tokenizer),
        prompt_logprobs=prompt_logprobs,
        encoder_prompt=encoder_prompt,
        encoder_input=request.encoder_input,
        mm_features=request.mm_features,
        rope=request.rope,
        answer=answer,
        beam_search=isinstance(params, BeamSearchParams),
        owner=request.owner,
        retain_kv=request.retain_kv,
        session=request.session,
        retention=request.retention,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        parent_id=request.parent_id,
        is_fallback=request.parent_id is not None and request.continuation_of is None,
        trace_headers=request.trace_headers,
    )


def _sequence_read(request: EngineCoreRequest) -> list[int]:
    """The tokens that an extraction's positions count in. Audio has none."""
    if not isinstance(request.params, Extraction) or not request.params.of_encoder:
        return request.prompt_token_ids
    assert request.encoder_input is not None
    return request.encoder_input.token_ids or []
