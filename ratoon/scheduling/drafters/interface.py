"""What a source of drafts on the host is to the scheduler.

A draft changes how fast tokens come, never which: the next step of the branch checks it. Sources that run on the device
(a smaller model, heads that read hidden states) return their drafts with a step's result instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratoon.scheduling.branch import Branch


class Drafter(Protocol):
    """A source of drafts. It sees the tokens of branches that are known, and no clock."""

    name: str  # in settings, metrics and `usage`: "ngram", "roots", …

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        """Returns guesses at the tokens behind those that the branch has, at most `max_tokens`; empty: it has none."""
        ...

    def num_matched(self, branch: Branch) -> int:
        """Returns the number of tokens by which the last draft of the branch was found; 0: it was not found so."""
        ...

    def drop(self, branch: Branch) -> None:
        """The branch has ended or was dropped: what is kept for it alone goes."""
        ...
