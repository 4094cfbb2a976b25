"""Tokens without a choice, where a device samples while the host is ahead of it: results tell them before they are
computed.

A mask that leaves one token to a row is often the first of several: its grammar knows the tokens behind it as well. The
result of the step has all of them. Steps that are under way by then sample the next ones once more, which is not told
again. The first step that begins afterwards appends them to the row, so that one step computes them all. Nothing waits,
neither for the device nor for a grammar.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence


class ToldRun:
    """The last tokens without a choice that a result told of a branch. The thread that takes results writes it, before
    it is queued for the thread that executes steps, and not again before a later step has sampled the branch."""

    __slots__ = ("first", "slot", "tokens")

    def __init__(self, slot: int, num_outputs: int) -> None:
        self.slot = slot
        self.first = num_outputs  # the place of the first of them in the branch's output
        self.tokens: Sequence[int] = ()

    def behind(self, num_outputs: int) -> list[int]:
        """Returns the tokens of this run that are missing in an output of so many tokens."""
        return list(self.tokens[num_outputs - self.first :])


class RunsOfStep:
    """The rows of a step that have a grammar: what its result may tell of each."""

    __slots__ = ("_branches", "_places", "_queue", "_rows", "tails")

    def __init__(
        self, rows: Sequence[int], branches: Sequence[ToldRun], places: Sequence[int], queue: deque[ToldRun]
    ) -> None:
        """`rows`: of the sampled ones; `places`: of their tokens in the output of the branch."""
        self._rows = rows
        self._branches = branches
        self._places = places
        self._queue = queue
        self.tails: Mapping[int, Sequence[int]] = {}  # by row, once masks are filled: the tokens behind its own

    def tell(self, bad: Collection[int]) -> dict[int, Sequence[int] | None]:
        """To be called once, with the step's tokens. Returns by row the tokens behind its own; None: its own one was
        told by an earlier result. Rows without a token (`bad`) are left out."""
        found: dict[int, Sequence[int] | None] = {}
        for row, branch, place in zip(self._rows, self._branches, self._places):
            if row in bad:
                continue
            if place < branch.first + len(branch.tokens):
                found[row] = None
            elif row in self.tails:
                found[row] = branch.tokens = self.tails[row]
                branch.first = place + 1
                self._queue.append(branch)
        return found
