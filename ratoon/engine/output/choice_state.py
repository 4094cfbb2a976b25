"""What the front end keeps of one of a request's choices: its tokens, its text, its log-probabilities, its end.

A sampled choice grows. A choice of a beam search is replaced each time: the best text may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from ratoon.core.outputs import CompletionOutput
from ratoon.core.params import BeamSearchParams
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.engine.output.detokenizer import Detokenizer, make_detokenizer
from ratoon.engine.output.logprobs import SampleLogprobsCollector


@dataclass(slots=True)
class ChoiceState:
    index: int
    detokenizer: Detokenizer
    logprobs: SampleLogprobsCollector | None = None
    make_detokenizer: Callable[[], Detokenizer] = Detokenizer  # of a beam search: for tokens that replace others
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens_delivered: int = 0
    score: float | None = None  # of a beam search, as is its sum
    cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ended_well(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def add_tokens(self, output: EngineCoreOutput) -> int:
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

    def replace_tokens(self, output: EngineCoreOutput, stop_token_ids: Collection[int]) -> None:
        """Replace the text by the best one of a beam search, which often only extends it."""
        token_ids, had = output.new_token_ids, len(self.detokenizer.token_ids)
        if had == 0 or token_ids[:had] != self.detokenizer.token_ids:
            self.detokenizer, had = self.make_detokenizer(), 0
        # The best text so far may be finished while the search continues.
        self.detokenizer.update(token_ids[had:], ended_by_token=token_ids[-1] in stop_token_ids)
        self.score = output.score
        self.cumulative_logprob = output.cumulative_logprob

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
            cumulative_logprob=self.cumulative_logprob if self.logprobs is None else self.logprobs.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.logprobs[start:],
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            score=self.score,
        )


def make_choices(request: EngineCoreRequest, tokenizer: Any | None) -> list[ChoiceState]:
    params = request.generation_params
    if params is None:
        return [ChoiceState(0, Detokenizer())]
    make = partial(make_detokenizer, tokenizer, request.prompt_token_ids, params)
    if isinstance(
        params, BeamSearchParams
    ):  # which may have thousands: a choice's detokenizer is made with its first text
        return [ChoiceState(index, Detokenizer(), make_detokenizer=make) for index in range(params.n)]
    return [
        ChoiceState(index, make(), None if params.logprobs is None else SampleLogprobsCollector(tokenizer))
        for index in range(params.n)
    ]
