"""Log-probabilities as the engine sends them (rows of numbers) to the form a caller reads (token id → Logprob).

The sampler has chosen and ranked the alternatives; only the sum is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ratoon.core.outputs import (
    Logprob,
    LogprobsLists,
    PromptLogprobs,
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


class PromptLogprobsCollector:
    """Log-probabilities of the prompt's tokens. The first token has none: nothing goes before it."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.logprobs: PromptLogprobs = [None]

    def add(self, chunks: Iterable[PromptLogprobsChunk]) -> None:
        for chunk in chunks:
            # A chunk that starts earlier repeats rows: the request was preempted and its prompt computed again.
            known = len(self.logprobs) - chunk.start
            for row in range(max(known, 0), len(chunk.rows.token_ids)):
                self.logprobs.append(_token_logprobs(chunk.rows, row, self._tokenizer))


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
