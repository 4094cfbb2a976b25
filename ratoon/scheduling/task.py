"""What one request asks for, as the scheduler's shared code sees it. Each kind of request (kinds/) has its own task.

A task belongs to one request. It manages the memory and the rows of its branches; its kind plans it and applies its
results.
"""

from __future__ import annotations

from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams
from ratoon.core.plan import SchedulerOutput
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.swap import Tables


class Task:
    """The defaults are for a task that has only branches."""

    __slots__ = ()

    branches_are_texts = True  # whether `retain_kv` and `return_hidden_states` are about its branches

    @property
    def needs_every_prompt_row(self) -> bool:
        """Whether the whole prompt must be computed, without prefix cache hits."""
        return False

    @property
    def reads_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are computed: such a token takes longer than others."""
        return False

    @property
    def can_be_swapped(self) -> bool:
        """Whether its blocks are its only state."""
        return True

    @property
    def reads_encoder_tokens(self) -> bool:
        """Whether a rule over tokens needs the encoder's tokens."""
        return False

    def params_for(self, choice: int) -> SamplingParams | BeamSearchParams | PoolingParams:
        """The params of a branch that is sent in full."""
        raise NotImplementedError

    def complete(self, plan: SchedulerOutput, branch_id: str) -> None:
        """Notes in the plan what the last row of this branch is used for: all of its tokens are computed with it."""
        raise NotImplementedError

    def num_written_tokens(self, plan: SchedulerOutput, branch_id: str) -> int:
        """Tokens of this branch whose keys and values a plan writes."""
        return plan.num_scheduled_tokens.get(branch_id, 0)

    def num_blocks_to_come(self, kv_cache: KVCacheManager) -> int:
        """Blocks needed, beyond those of its branch's tokens, as soon as these are computed."""
        return 0

    def tails(self) -> list[Tables]:
        """Block tables that it holds beside its branch's."""
        return []

    @property
    def num_tail_tokens(self) -> int:
        """Computed tokens of those tables, behind the branch's."""
        return 0

    def swap_out(self) -> bool:
        """Swap out the branch with the task's other memory. False: there is none, or not enough host memory, and
        nothing changed."""
        return False

    def reclaim(self) -> None:
        """Frees the task's other memory, because its branch is preempted."""

    def release(self) -> None:
        """Frees what the task holds, because its branch ends."""
        self.reclaim()
