"""Sequences of tokens that are never completed.

Words given as text (`bad_words`) are matched against the output only, as in vLLM; sequences of token ids
(`bad_words_ids`) against prompt and output, as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.execution.rules.base import ForbiddingRule, Reads


class WordIndex:
    """Words by all their tokens but the last, so that a step does one lookup per word length."""

    __slots__ = ("always", "ends", "lengths")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        ends: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            ends.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self.always = sorted(ends.pop((), ()))  # words of one token
        self.ends = {beginning: sorted(tokens) for beginning, tokens in ends.items()}
        self.lengths = sorted({len(beginning) for beginning in ends})


@dataclass(frozen=True, slots=True)
class BadWords(ForbiddingRule):
    words: WordIndex
    last: tuple[int, ...] = ()  # as many tokens as the longest word needs

    @classmethod
    def behind(cls, words: Sequence[Sequence[int]], token_ids: Sequence[int] = ()) -> BadWords:
        """`token_ids`: the text so far, which may end with the beginning of a word."""
        index = WordIndex(words)
        longest = index.lengths[-1] if index.lengths else 0
        return cls(index, tuple(token_ids[max(0, len(token_ids) - longest) :]) if longest else ())

    @property
    def reads(self) -> Reads:
        return Reads.TOKENS if self.words.lengths else Reads.NOTHING

    def after(self, token_id: int) -> BadWords:
        lengths = self.words.lengths
        return self if not lengths else BadWords(self.words, (*self.last, token_id)[-lengths[-1] :])

    def forbidden(self) -> Sequence[int]:
        words, last = self.words, self.last
        found = words.always
        for length in words.lengths:
            if length > len(last):
                break
            ends = words.ends.get(last[-length:])
            if ends is not None:
                found = [*found, *ends]
        return found
