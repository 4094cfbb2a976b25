"""What one request asks for, as the scheduler's shared code sees it. Each kind of request (kinds/) has its own task.

A task belongs to one request. It answers for the memory and the rows of its branches; what is planned for it, and what
becomes of the results, is its kind's to say.
"""

from __future__ import annotations

from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.memory.kv_cache_manager import KVCacheManager


class Task:
    """What is said here holds for a task that has nothing but branches."""

    __slots__ = ()

    leases_branches = True  # `retain_kv` keeps the memory of its branches

    @property
    def needs_every_prompt_row(self) -> bool:
        """Must the whole prompt be computed, whatever the prefix cache has of it?"""
        return False

    @property
    def can_be_swapped(self) -> bool:
        """Are its blocks all that there is of it?"""
        return True

    @property
    def ends_lease(self) -> bool:
        """Was the memory that it reads kept for it alone?"""
        return False

    @property
    def reads_encoder_tokens(self) -> bool:
        """Does the runner need the encoder's tokens to know which are impossible?"""
        return False

    def params_for(self, choice: int) -> SamplingParams | BeamSearchParams | PoolingParams:
        """What the runner needs to know of a branch that it gets in full."""
        raise NotImplementedError

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        """All tokens of this branch are computed with this plan: say in it what the last row is for."""
        raise NotImplementedError

    def num_written_tokens(self, plan: SchedulerOutput, branch_id: str) -> int:
        """Tokens of this branch whose keys and values a plan writes."""
        return plan.num_scheduled_tokens.get(branch_id, 0)

    def num_blocks_to_come(self, kv_cache: KVCacheManager) -> int:
        """What it needs beside its branch's tokens as soon as these are computed."""
        return 0

    def swap_out(self) -> bool:
        """Move the branch and all that it holds behind it to the host. False: there is nothing but the branch, or no
        room for all of it, and nothing changed."""
        return False

    def set_back(self) -> None:
        """Its branch loses its memory: give back all that is held behind it."""

    def release(self) -> None:
        """Its branch ends."""
        self.set_back()
