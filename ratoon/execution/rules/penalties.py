"""Penalties on tokens that occurred before (`repetition_penalty`, `frequency_penalty`, `presence_penalty`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ratoon.execution.inputs.cells import cells
from ratoon.execution.rules.base import LogitsRule, Reads, Stage
from ratoon.layers import sampling


class TokenCounts:
    """The distinct tokens of a row and how often its output holds each, in arrays that grow.

    All rules along one text share one of these: it only grows, and each rule knows the length of its output. A rule
    that is no longer the newest continues with a copy.
    """

    __slots__ = ("_counts", "_num_prompt", "_place", "_tokens", "output")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num_prompt = len(distinct)
        self._place = dict(zip(distinct.tolist(), range(len(distinct))))
        self._tokens = np.zeros(max(64, 2 * len(distinct)), dtype=np.int64)
        self._tokens[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self.output: list[int] = []

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token_id
        self._counts[place] += 1
        self.output.append(token_id)

    def at(self, num_outputs: int) -> TokenCounts:
        """A copy as of an output of `num_outputs` tokens. Removes tokens one by one: drafts, at most a few."""
        copy = object.__new__(TokenCounts)
        copy._num_prompt, copy._place = self._num_prompt, self._place.copy()
        copy._tokens, copy._counts = self._tokens.copy(), self._counts.copy()
        copy.output = self.output[:num_outputs]
        for token_id in reversed(self.output[num_outputs:]):
            place = copy._place[token_id]
            copy._counts[place] -= 1
            if copy._counts[place] == 0 and place >= self._num_prompt:  # not in the prompt: it is the last entry
                del copy._place[token_id]
        return copy

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their counts in the output."""
        return self._tokens[: len(self._place)], self._counts[: len(self._place)]


@dataclass(frozen=True, slots=True)
class Penalties(LogitsRule):
    """Repetition looks at prompt and output, frequency and presence at the output alone."""

    weights: tuple[float, float, float]  # repetition, frequency, presence
    counts: TokenCounts  # of at least `num_outputs` tokens
    num_outputs: int = 0

    stage = Stage.PENALTIES

    @classmethod
    def behind(cls, weights: tuple[float, float, float], prompt_token_ids: Sequence[int]) -> Penalties:
        return cls(weights, TokenCounts(prompt_token_ids if weights[0] != 1.0 else ()))

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> Penalties:
        counts = self._own_counts()
        counts.add(token_id)
        return Penalties(self.weights, counts, self.num_outputs + 1)

    def _own_counts(self) -> TokenCounts:
        """The shared ones while this is the newest rule, otherwise a copy."""
        counts = self.counts
        return counts if len(counts.output) == self.num_outputs else counts.at(self.num_outputs)

    @staticmethod
    def apply(logits: torch.Tensor, rows: np.ndarray, rules: Sequence[Penalties]) -> None:
        token_lists, count_lists = zip(*(rule._own_counts().arrays() for rule in rules))
        weights = np.array([rule.weights for rule in rules], np.float32)  # [N, 3]
        weights = np.repeat(weights, [len(tokens) for tokens in token_lists], axis=0).T  # [3, E]
        sampling.apply_penalties(logits, *cells(logits, rows, token_lists, np.concatenate(count_lists), *weights))
