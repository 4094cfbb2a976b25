"""What the request in each row asks of sampling, kept between steps: numbers in arrays, and edits of logits.

Nothing is chosen here: execution/sampler.py does that.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ratoon.core.params import SamplingParams
from ratoon.execution.rules.base import NO_VERDICT, RowRules, Verdict
from ratoon.execution.rules.build import rules_of
from ratoon.layers import sampling


class Needs(enum.IntFlag):
    """What a row needs beyond the largest logit. A row that needs nothing costs an argmax."""

    NOTHING = 0
    RANDOM = 1  # temperature
    FILTER = 2  # top_k, top_p, min_p
    ALLOWED = 4
    VERDICT = 8  # its rules forbid or force something now
    MIN_TOKENS = 16  # until the row has them
    BIAS = 32
    PENALTY = 64
    LOGPROBS = 128
    SUPPRESSED = 256
    FIRST = 512  # tokens that are suppressed as the first, until the row has one
    TIMESTAMPS = 1024
    RULES = 2048  # it has rules that look at its tokens, whatever they say now


MASKS = Needs.ALLOWED | Needs.VERDICT | Needs.MIN_TOKENS | Needs.SUPPRESSED | Needs.FIRST | Needs.TIMESTAMPS
EDITS = MASKS | Needs.BIAS | Needs.PENALTY
HISTORY = Needs.PENALTY | Needs.RULES  # these look at the tokens so far
PASSING = Needs.MIN_TOKENS | Needs.FIRST  # these are over at some length


class TokenCounts:
    """The distinct tokens of a row and how often its output holds each, in arrays that grow."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._place = {int(token): place for place, token in enumerate(distinct)}
        self._tokens = np.zeros(max(64, 2 * len(distinct)), dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token_id
        self._counts[place] += 1

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their counts in the output."""
        return self._tokens[: len(self._place)], self._counts[: len(self._place)]


@dataclass(slots=True)
class RowEdits:
    """The parts of a row's request that change logits; None where it has no such part."""

    allowed: np.ndarray | None = None  # int64
    stop_ids: np.ndarray | None = None  # held back by min_tokens
    bias_ids: np.ndarray | None = None
    bias: np.ndarray | None = None  # float32
    counts: TokenCounts | None = None
    suppressed: np.ndarray | None = None  # int64
    suppressed_first: np.ndarray | None = None
    rules: RowRules | None = None
    verdict: Verdict = NO_VERDICT  # theirs about the next token


NO_EDITS = RowEdits()


class SamplingRows:
    """What the request in each slot asks for, in arrays indexed by slot. Grows when a slot lies beyond its end."""

    def __init__(self, max_slots: int) -> None:
        self.needs = np.zeros(max_slots, dtype=np.uint16)
        self.seeds = np.zeros(max_slots, dtype=np.uint64)
        self.num_outputs = np.zeros(max_slots, dtype=np.int64)
        self.min_tokens = np.zeros(max_slots, dtype=np.int64)
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.top_p = np.ones(max_slots, dtype=np.float64)
        self.min_p = np.zeros(max_slots, dtype=np.float32)
        self.penalties = np.zeros((max_slots, 3), dtype=np.float32)  # repetition, frequency, presence
        self.num_logprobs = np.zeros(max_slots, dtype=np.int64)
        self.edits = [NO_EDITS] * max_slots

    def add(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        encoder_token_ids: Sequence[int] = (),
    ) -> None:
        """Take a branch in. `output_token_ids` is what it generated before: a resumed branch goes on where it was."""
        self._grow(slot + 1)
        edits = _edits_of(params, prompt_token_ids, encoder_token_ids)
        needs = _needs_of(params, edits)
        self.edits[slot] = edits
        self.needs[slot] = needs
        self.seeds[slot] = sampling.seed_to_uint64(seed)
        self.num_outputs[slot] = len(output_token_ids)
        self.min_tokens[slot] = params.min_tokens
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.penalties[slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        if edits.counts is not None:
            for token_id in output_token_ids:
                edits.counts.add(token_id)
        if edits.rules is not None:
            edits.rules = edits.rules.after_all(output_token_ids)
            self._judge(slot)
        self._end_passing(np.array([slot]))

    def remove(self, slot: int) -> None:
        self.needs[slot] = Needs.NOTHING
        self.edits[slot] = NO_EDITS

    def append_token(self, slot: int, token_id: int) -> None:
        self.append_tokens(np.array([slot]), np.array([token_id]))

    def append_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One new output token for each of these slots. No slot comes twice."""
        self.num_outputs[slots] += 1
        needs = self.needs[slots]
        if not (needs & (HISTORY | PASSING)).any():
            return
        self._end_passing(slots)
        for place in np.flatnonzero(needs & HISTORY):
            self._remember(int(slots[place]), int(tokens[place]))

    def _end_passing(self, slots: np.ndarray) -> None:
        lengths = self.num_outputs[slots]
        self.needs[slots[lengths >= self.min_tokens[slots]]] &= ~np.uint16(Needs.MIN_TOKENS)
        self.needs[slots[lengths > 0]] &= ~np.uint16(Needs.FIRST)

    def _remember(self, slot: int, token_id: int) -> None:
        edits = self.edits[slot]
        if edits.counts is not None:
            edits.counts.add(token_id)
        if edits.rules is not None:
            edits.rules = edits.rules.after(token_id)
            self._judge(slot)

    def _judge(self, slot: int) -> None:
        """Ask the rules of a row about its next token. A row to which they say nothing now is like one without."""
        edits = self.edits[slot]
        assert edits.rules is not None
        edits.verdict = edits.rules.verdict()
        if edits.verdict:
            self.needs[slot] |= np.uint16(Needs.VERDICT)
        else:
            self.needs[slot] &= ~np.uint16(Needs.VERDICT)

    def _grow(self, num_slots: int) -> None:
        missing = num_slots - len(self.edits)
        if missing <= 0:
            return
        missing = max(missing, len(self.edits))  # at least double: adding slot after slot stays linear
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                room = np.zeros((missing, *value.shape[1:]), dtype=value.dtype)
                setattr(self, name, np.concatenate([value, room]))
        self.edits += [NO_EDITS] * missing


def _edits_of(params: SamplingParams, prompt_token_ids: Sequence[int], encoder_token_ids: Sequence[int]) -> RowEdits:
    edits = RowEdits(rules=rules_of(params, prompt_token_ids, encoder_token_ids))
    if params.allowed_token_ids is not None:
        edits.allowed = np.unique(np.asarray(params.allowed_token_ids, dtype=np.int64))
    stop_ids = {*(params.eos_token_ids or ()), *(params.stop_token_ids or ()), *(params.all_stop_token_ids or ())}
    if params.min_tokens > 0 and stop_ids:
        edits.stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
    if params.logit_bias:
        edits.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        edits.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
    if params.repetition_penalty != 1.0:
        edits.counts = TokenCounts(prompt_token_ids)
    elif params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        edits.counts = TokenCounts(())  # these two do not look at the prompt
    suppressed = {*(params.suppressed_token_ids or ())}
    if params.timestamps is not None:
        suppressed.add(params.timestamps.no_timestamps_token_id)
    if suppressed:
        edits.suppressed = np.array(sorted(suppressed), dtype=np.int64)
    if params.suppressed_first_token_ids:
        edits.suppressed_first = np.unique(np.asarray(params.suppressed_first_token_ids, dtype=np.int64))
    return edits


def _needs_of(params: SamplingParams, edits: RowEdits) -> Needs:
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    answers = {
        Needs.RANDOM: not params.is_greedy,
        Needs.FILTER: not params.is_greedy and filtered,
        Needs.ALLOWED: edits.allowed is not None,
        Needs.MIN_TOKENS: edits.stop_ids is not None,
        Needs.BIAS: edits.bias is not None,
        Needs.PENALTY: edits.counts is not None,
        Needs.LOGPROBS: params.logprobs is not None,
        Needs.SUPPRESSED: edits.suppressed is not None,
        Needs.FIRST: edits.suppressed_first is not None,
        Needs.TIMESTAMPS: params.timestamps is not None,
        Needs.RULES: edits.rules is not None,
    }
    return Needs(sum(need for need, answer in answers.items() if answer))
