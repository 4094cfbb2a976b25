"""How much of everything, and the words that all parts use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens."""

    before: int = 700  # what a search begins after
    suffix: int = 5
    width: int = 32
    tokens: int = 3  # of each beam
    repeats: int = 5  # searches in a round of the latency part: they are short
    decode_tokens: int = 21  # the first tells the TTFT, the others what a step takes
    prefixes: tuple[int, ...] = (64, 256, 700, 1400, 2800)
    widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    step_tokens: int = 9

    @property
    def longest(self) -> int:
        """Positions that an engine needs."""
        return max(self.before, *self.prefixes) + self.suffix + max(self.tokens, self.step_tokens, self.decode_tokens)


QUICK = Sizes(
    before=40, width=4, repeats=2, decode_tokens=4, prefixes=(16, 48), widths=(2, 4), step_tokens=4
)  # does it work at all? says nothing about speed
