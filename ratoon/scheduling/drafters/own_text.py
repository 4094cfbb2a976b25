"""Drafts from the text of a request itself: what followed the last time that its last tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.ngrams import NgramIndex

TOKENS_AT_ONCE = 2048  # of a long prompt that are indexed for one draft: well under a millisecond's work


class OwnPlace:
    """Where in its own text a branch is."""

    __slots__ = ("distance", "index", "num_matched", "num_tokens")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.distance = 0  # from the end of the text back to where it occurred before
        self.num_matched = 0  # tokens before both that are equal
        self.num_tokens = 0  # of the text, when it was looked up

    def find(self, tokens: list[int]) -> int:
        """Returns the position of the token that should come next, or -1."""
        self.index.extend(TOKENS_AT_ONCE)
        position, num_equal = self.index.find(tokens)
        distance = len(tokens) - position
        if position >= 0 and distance == self.distance:  # the text went on as it did there
            num_equal = max(num_equal, self.num_matched + len(tokens) - self.num_tokens)
        self.distance, self.num_matched, self.num_tokens = distance, num_equal, len(tokens)
        return position


class NgramDrafter:
    """Prompt lookup: the longest match wins, of equal ones the last."""

    name = "ngram"

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._places: dict[Branch, OwnPlace] = {}

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        tokens, place = branch.token_ids, self._places.get(branch)
        if place is None:
            place = self._places[branch] = OwnPlace(NgramIndex(tokens, self._least, self._most))
        position = place.find(tokens)
        if position < 0:
            return ()
        drafts = tokens[position : position + max_tokens]
        period = len(tokens) - position  # a text that repeats itself goes on as it did
        while len(drafts) < max_tokens:
            drafts.append(drafts[-period])
        return drafts

    def num_matched(self, branch: Branch) -> int:
        return self._places[branch].num_matched

    def drop(self, branch: Branch) -> None:
        self._places.pop(branch, None)
