"""Drafts of a model or head on the device: they come with the result of a step, and wait here to be proposed."""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.scheduling.branch import Branch


class DeviceDrafter:
    """Implements Drafter. How many tokens are drafted is in the plan of the step (`SchedulerOutput.draft_lengths`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._drafts: dict[Branch, tuple[int, Sequence[int]]] = {}  # with the tokens that the branch had

    def receive(self, branch: Branch, drafts: Sequence[int]) -> None:
        """A step brought these guesses at the tokens behind those that the branch has now."""
        self._drafts[branch] = branch.num_tokens, drafts

    def propose(self, branch: Branch, max_tokens: int) -> Sequence[int]:
        num_tokens, drafts = self._drafts.get(branch, (-1, ()))
        return drafts[:max_tokens] if num_tokens == branch.num_tokens else ()

    def num_matched(self, branch: Branch) -> int:
        return 0

    def drop(self, branch: Branch) -> None:
        self._drafts.pop(branch, None)
