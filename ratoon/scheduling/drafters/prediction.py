"""Drafts from a text that the request brings, because most of its answer is expected to be that text: OpenAI's
`prediction`."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.core.speculation import PREDICTION
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.drafters.ngrams import NgramIndex
from ratoon.scheduling.drafters.own_text import TOKENS_AT_ONCE

LEAST_MATCH, MOST_MATCH = 2, 16  # tokens by which the text finds back to what is expected


class Place:
    """Where in the expected text an answer is."""

    __slots__ = ("index", "next", "num_prompt_tokens", "num_seen")

    def __init__(self, expected: list[int], num_prompt_tokens: int) -> None:
        self.index = NgramIndex(expected, LEAST_MATCH, MOST_MATCH)
        self.next = 0  # the expected token that should come next; -1: the answer has left the text
        self.num_prompt_tokens = num_prompt_tokens
        self.num_seen = num_prompt_tokens  # tokens of prompt and answer that were compared

    def follow(self, token_ids: list[int]) -> None:
        """Goes on with the tokens behind those that were compared, or finds the answer's end in the text. `token_ids`:
        of prompt and answer."""
        expected = self.index.tokens
        for token in token_ids[self.num_seen :]:
            is_expected = 0 <= self.next < len(expected) and expected[self.next] == token
            self.next = self.next + 1 if is_expected else -1
        self.num_seen = len(token_ids)
        self.index.extend(TOKENS_AT_ONCE)
        if self.next < 0:
            answered = token_ids[max(self.num_prompt_tokens, len(token_ids) - MOST_MATCH) :]
            self.next, _ = self.index.find(answered)


class PredictionDrafter:
    name = PREDICTION

    def __init__(self) -> None:
        self._places: dict[Branch, Place] = {}

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        place = self._places.get(branch)
        if place is None:
            place = self._places[branch] = Place(branch.request.prediction, branch.num_prompt_tokens)
        place.follow(branch.token_ids)
        return place.index.tokens[place.next : place.next + max_tokens] if place.next >= 0 else ()

    def num_matched(self, branch: Branch) -> int:
        return 0

    def drop(self, branch: Branch) -> None:
        self._places.pop(branch, None)
