"""Branches whose blocks are loaded from the block store: they wait outside the queue until the blocks have arrived.

Others overtake them. When all blocks of a branch have arrived, or failed to, it goes back to the front of the queue
with what is there, and computes the rest. It holds its blocks there, and gives them up before a running branch is
preempted.
"""

from __future__ import annotations

from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.scheduling.branch import Branch


class LoadingBranches:
    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._waiting: dict[Branch, set[int]] = {}  # outside the queue, with the blocks that failed to arrive so far
        self._loaded: dict[Branch, None] = {}  # in the queue again, with blocks

    def __len__(self) -> int:
        """Branches outside the queue."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """The rows that branches outside the queue will take."""
        return sum(branch.num_rows for branch in self._waiting)

    def wait(self, branch: Branch) -> bool:
        """A branch has begun to load its blocks. False: they are all there, and it can go on."""
        if self._kv_cache.is_arriving(branch):
            self._loaded.pop(branch, None)
            self._waiting[branch] = set()
            return True
        self._settle(branch, set())
        return False

    def arrived(self, lost: set[int]) -> list[Branch]:
        """Blocks have arrived, except those that are lost. Returns the branches that waited for nothing else."""
        done = []
        for branch, lost_before in list(self._waiting.items()):
            lost_before |= lost
            if not self._kv_cache.is_arriving(branch):
                self._settle(branch, self._waiting.pop(branch))
                done.append(branch)
        return done

    def _settle(self, branch: Branch, lost: set[int]) -> None:
        self._kv_cache.settle(branch, lost)
        if branch.block_tables or branch.cross is not None:
            self._loaded[branch] = None

    def fail(self) -> list[Branch]:
        """Steps failed that may have written what branches hold here: they give it up. Returns those that were outside
        the queue, which are computed: a load that made a step fail is not tried again."""
        outside, self._waiting = list(self._waiting), {}
        for branch in outside:
            self._kv_cache.free(branch)
        for branch in self._loaded:
            self._kv_cache.unload(branch)
        self._loaded.clear()
        return outside

    def forget(self, branch: Branch) -> None:
        """A branch runs, or has ended."""
        self._waiting.pop(branch, None)
        self._loaded.pop(branch, None)

    def free_one(self, sparing: Branch | None = None) -> bool:
        """Free the blocks of the branch that was loaded last, because others need memory: it is loaded again. False:
        there is none besides `sparing`."""
        for branch in reversed(self._loaded):
            if branch is not sparing:
                self._kv_cache.unload(branch)
                del self._loaded[branch]
                return True
        return False

    def outside(self) -> set[Branch]:
        """The branches outside the queue, for checks."""
        return set(self._waiting)

    def holders(self) -> set[Branch]:
        """The branches in the queue that hold blocks, for checks."""
        return set(self._loaded)
