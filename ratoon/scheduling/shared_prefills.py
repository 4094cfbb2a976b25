"""What a branch starts with: its parent's memory, a prefix cache hit, the cross table of its encoder input, or its
swapped-out blocks. The planners decide whether it is admitted and what is preempted for it.
"""

from __future__ import annotations

import enum

from ratoon.core.request import InheritedFrom
from ratoon.memory.kv_cache_manager import GroupBlocks
from ratoon.observe.logging import get_logger
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft

logger = get_logger(__name__)


class Admission(enum.Enum):
    """The result of trying to admit a waiting branch."""

    ADMITTED = enum.auto()
    NO_MEMORY = enum.auto()
    NOT_NOW = enum.auto()  # it does not fit in the rest of this step


class SharedPrefills:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def inherit(self, branch: Branch, most: int, num_left: int = 1) -> int:
        """Let a continuation share its parent's memory, if leased or still running. Returns its computed tokens."""
        request = branch.request
        if request.continuation_of is None or branch.choice != 0 or request.task.needs_every_prompt_row:
            return 0
        running = self._state.branches.get(request.continuation_of)
        parent = self._state.leases.find(request.continuation_of) or running
        if parent is None:
            return 0
        if running is not None and parent is running and not running.known_to_runner:
            # The parent enters in this same step, which may write its prefix hits: such blocks are shared, never
            # copied.
            most -= most % self._state.kv_cache.block_size
        return self._state.kv_cache.inherit_blocks_from_parent(parent, branch, most, num_left)

    def note_inheritance(self, branch: Branch, num_inherited: int) -> None:
        request = branch.request
        if request.continuation_of is None:
            return
        self._state.leases.continuation_left(request.continuation_of, request.request_id)
        if num_inherited:
            self._state.leases.stats.continued += 1
            source = InheritedFrom.LEASE
        else:
            source = InheritedFrom.PREFIX_CACHE if branch.num_cached_tokens else InheritedFrom.RECOMPUTED
        self._state.inherited[request.request_id] = source
        logger.debug(
            "%s continues %s: inherited %d of %d prompt tokens (%s)",
            request.request_id,
            request.continuation_of,
            branch.num_cached_tokens,
            branch.num_tokens,
            source,
        )

    def find_prefix(self, branch: Branch) -> tuple[GroupBlocks | None, int]:
        # Prompt log-probabilities and mean pooling need every prompt row computed: no lookup.
        if branch.choice == 0 and branch.request.task.needs_every_prompt_row:
            return None, 0
        return self._state.kv_cache.get_computed_blocks(branch)

    def attach_cross(self, step: StepDraft, branch: Branch) -> Admission:
        """Give the branch its cross table: an existing one, or a new one that the encoder writes in this step. An input
        is never split; one that is longer than the budget runs alone."""
        encoder_input = branch.request.encoder_input
        if encoder_input is None or branch.cross is not None:
            return Admission.ADMITTED
        kv_cache = self._state.kv_cache
        runs = not kv_cache.has_cross(branch, encoder_input)
        if runs and not step.fits_encoder(encoder_input.num_positions):
            return Admission.NOT_NOW
        if not kv_cache.attach_cross(branch, encoder_input):
            return Admission.NO_MEMORY
        if runs:
            step.encoder_lengths.append(encoder_input.num_positions)
        return Admission.ADMITTED

    def num_missing_cross_blocks(self, branch: Branch) -> int:
        """Blocks needed for the cross table of its encoder input, if it does not exist."""
        encoder_input, kv_cache = branch.request.encoder_input, self._state.kv_cache
        if encoder_input is None or kv_cache.has_cross(branch, encoder_input):
            return 0
        return kv_cache.num_cross_blocks(encoder_input.num_positions)
