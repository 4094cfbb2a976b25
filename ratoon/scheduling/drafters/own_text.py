"""Drafts from the text of a request itself: what followed the last time that its last tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.ngrams import NgramIndex

TOKENS_AT_ONCE = 2048  # of a long prompt that are indexed for one draft: well under a millisecond's work


class NgramDrafter:
    """Prompt lookup: the longest match wins, of equal ones the last."""

    name = "ngram"

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._indices: dict[Branch, NgramIndex] = {}

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        index = self._indices.get(branch)
        if index is None:
            index = self._indices[branch] = NgramIndex(branch.token_ids, self._least, self._most)
        index.extend(TOKENS_AT_ONCE)
        tokens = branch.token_ids
        position = index.find(tokens)
        if position < 0:
            return ()
        drafts = tokens[position : position + max_tokens]
        period = len(tokens) - position  # a text that repeats itself goes on as it did
        while len(drafts) < max_tokens:
            drafts.append(drafts[-period])
        return drafts

    def drop(self, branch: Branch) -> None:
        self._indices.pop(branch, None)
