"""Copy-on-write: the block copies of the next plan. Which table entries are copied is decided by the callers."""

from __future__ import annotations

from ratoon.core.plan import BlockCopy


class BlockCopies:
    """A copy is made before anything else is written in the step (core/plan.py). Its target has the content only then,
    so whatever reads the target for the same step, a further copy or the block store, reads the copy's source instead.
    Each block is the target of at most one copy: if it was freed and taken for another one, the later one replaces the
    earlier. A block that was freed and then taken for new tokens may still be written by the earlier copy: the step
    writes the tokens after it.
    """

    def __init__(self) -> None:
        self._copies: dict[int, BlockCopy] = {}  # by the block that is written to

    def add(self, branch_id: str, group: int, place: int, source: int, target: int) -> None:
        source = self.source_of(source)
        self.forget_target(target)
        self._copies[target] = BlockCopy(branch_id, group, place, source, target)

    def source_of(self, block_id: int) -> int:
        """The block that has this one's content when the step begins."""
        copy = self._copies.get(block_id)
        return block_id if copy is None else copy.src

    def forget_target(self, block_id: int) -> None:
        """A block gets its content in another way: an earlier copy to it, whose target was freed since, is dropped."""
        self._copies.pop(block_id, None)

    def forget_branch(self, branch_id: str) -> None:
        for copy in [copy for copy in self._copies.values() if copy.req_id == branch_id]:
            del self._copies[copy.dst]

    def take(self) -> list[BlockCopy]:
        """The copies, in order. Each is returned once."""
        copies, self._copies = self._copies, {}
        return list(copies.values())
