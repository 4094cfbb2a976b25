"""Log-probabilities as the engine sends them (rows of numbers) to the form a caller reads (token id → Logprob).

The sampler has chosen and ranked the alternatives; only the sum is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from ratoon.core.outputs import (
    Logprob,
    LogprobsLists,
    PromptLogprobsChunk,
    SampleLogprobs,
    TokenLogprobs,
)


class SampleLogprobsCollector:
    """Log-probabilities of one choice's generated tokens, in order."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.logprobs: SampleLogprobs = []
        self.cumulative_logprob = 0.0

    def add(self, rows: LogprobsLists, num_rows: int) -> None:
        """Add the first `num_rows` rows: those of tokens that were kept (a stop string may have cut some off)."""
        for row in range(min(num_rows, len(rows.token_ids))):
            self.cumulative_logprob += rows.logprobs[row][0]
            self.logprobs.append(_token_logprobs(rows, row, self._tokenizer))


class PromptPositions(Sequence[TokenLogprobs | None]):
    """Log-probabilities of the prompt's tokens. The first token has none: nothing goes before it.

    A long prompt has hundreds of thousands of entries, and a step brings many of them at once: each position gets its
    form when it is read for the first time, by its reader.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._rows: list[tuple[LogprobsLists, int]] = []  # of the positions from the second on: rows, and which of them
        self._read: dict[int, TokenLogprobs] = {}

    def append(self, rows: LogprobsLists, row: int) -> None:
        self._rows.append((rows, row))

    def __len__(self) -> int:
        return 1 + len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def _at(self, place: int) -> TokenLogprobs | None:
        if place == 0:
            return None
        found = self._read.get(place)
        if found is None:
            found = self._read[place] = _token_logprobs(*self._rows[place - 1], self._tokenizer)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class PromptLogprobsCollector:
    def __init__(self, tokenizer: Any | None) -> None:
        self.logprobs = PromptPositions(tokenizer)

    def add(self, chunks: Iterable[PromptLogprobsChunk]) -> None:
        for chunk in chunks:
            # A chunk that starts earlier repeats rows: the request was preempted and its prompt computed again.
            known = len(self.logprobs) - chunk.start
            for row in range(max(known, 0), len(chunk.rows.token_ids)):
                self.logprobs.append(chunk.rows, row)


def _token_logprobs(rows: LogprobsLists, row: int, tokenizer: Any | None) -> TokenLogprobs:
    """One position. The row's first entry is the token itself; the ones after it are the top ones, from rank 1 on."""
    token_ids: Sequence[int] = rows.token_ids[row]
    values: Sequence[float] = rows.logprobs[row]
    position: TokenLogprobs = {}
    for place, (token, value) in enumerate(zip(token_ids, values)):
        if token in position:
            continue  # the token itself is among the top ones
        rank = rows.sampled_ranks[row] if place == 0 else place
        text = None if tokenizer is None else tokenizer.token_text(token)
        position[token] = Logprob(logprob=value, rank=rank, decoded_token=text)
    return position
