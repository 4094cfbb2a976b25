"""No n-gram is repeated: neither of the sequence itself nor, as a separate rule, of the encoder's input.

As in transformers (`no_repeat_ngram_size`, `encoder_no_repeat_ngram_size`), prompt and output count as one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakValueDictionary

import numpy as np

from ratoon.execution.rules.base import ForbiddingRule, Reads
from ratoon.execution.rules.persistent_map import PersistentMap

Prefix = tuple[int, ...]  # n - 1 tokens
EMPTY = PersistentMap()


class NGramIndex:
    """Which tokens follow which n - 1 tokens in a fixed sequence."""

    __slots__ = ("__weakref__", "_followers")

    def __init__(self, size: int, token_ids: Sequence[int]) -> None:
        followers: dict[Prefix, dict[int, None]] = {}
        for *prefix, last in zip(*(token_ids[start:] for start in range(size))):
            followers.setdefault(tuple(prefix), {})[last] = None
        self._followers = {prefix: tuple(tokens) for prefix, tokens in followers.items()}

    def get(self, prefix: Prefix) -> tuple[int, ...]:
        return self._followers.get(prefix, ())


# Choices of one request, and requests with the same source, share one index while any of them runs.
_in_use: WeakValueDictionary[tuple[int, bytes], NGramIndex] = WeakValueDictionary()


def index_of(size: int, token_ids: Sequence[int]) -> NGramIndex:
    key = (size, blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).digest())
    found = _in_use.get(key)
    if found is None:
        found = _in_use[key] = NGramIndex(size, token_ids)
    return found


@dataclass(frozen=True, slots=True)
class NoRepeatedNGrams(ForbiddingRule):
    """The prompt's n-grams are in an index that all forks share, those that end in the output in a persistent map."""

    size: int
    prompt: NGramIndex
    last: Prefix  # the last n - 1 tokens, or all if there are fewer
    output: PersistentMap = EMPTY

    @classmethod
    def behind(cls, size: int, prompt_token_ids: Sequence[int]) -> NoRepeatedNGrams:
        return cls(size, index_of(size, prompt_token_ids), _tail(prompt_token_ids, size - 1))

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS

    def after(self, token_id: int) -> NoRepeatedNGrams:
        output = self.output
        if len(self.last) == self.size - 1 and token_id not in self.prompt.get(self.last):
            seen = output.get(self.last, ())
            if token_id not in seen:
                output = output.set(self.last, (*seen, token_id))
        return NoRepeatedNGrams(self.size, self.prompt, _tail((*self.last, token_id), self.size - 1), output)

    def forbidden(self) -> Sequence[int]:
        return (*self.prompt.get(self.last), *self.output.get(self.last, ()))


@dataclass(frozen=True, slots=True)
class NoNGramsOf(ForbiddingRule):
    """No n-gram of another sequence is completed: the encoder's input, or the prompt of a model without an encoder."""

    size: int
    source: NGramIndex
    last: Prefix

    @classmethod
    def behind(cls, size: int, source_token_ids: Sequence[int], prompt_token_ids: Sequence[int]) -> NoNGramsOf:
        return cls(size, index_of(size, source_token_ids), _tail(prompt_token_ids, size - 1))

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS if self.size > 1 else Reads.NOTHING

    def after(self, token_id: int) -> NoNGramsOf:
        return NoNGramsOf(self.size, self.source, _tail((*self.last, token_id), self.size - 1))

    def forbidden(self) -> Sequence[int]:
        return self.source.get(self.last)


def _tail(token_ids: Sequence[int], count: int) -> Prefix:
    return tuple(token_ids[max(0, len(token_ids) - count) :]) if count else ()
