"""What a branch starts with: its parent's memory, a prefix cache hit, the cross table of its encoder input, or what the
block store has of it. The planners decide whether it is admitted and what is preempted for it.
"""

from __future__ import annotations

import enum

from ratoon.core.kv import SwapCosts
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
    LOADING = enum.auto()  # it waits for blocks, outside the queue


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
        moved_to = self._state.leases.place_of(request.continuation_of)
        self._state.leases.continuation_left(request.continuation_of, request.request_id)
        if num_inherited:
            self._state.leases.stats.continued += 1
            source = InheritedFrom.LEASE
        elif moved_to is not None and branch.num_cached_tokens:
            self._state.leases.stats.continued += 1
            source = moved_to
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

    def load(self, branch: Branch, max_new_tokens: int) -> Admission | None:
        """Begin to load what the block store has of a branch: what was saved when it was preempted, or a prefix that
        other requests computed. `max_new_tokens`: it could run so many now. None: it has what there is."""
        kv_cache, task = self._state.kv_cache, branch.request.task
        if kv_cache.is_swapped(branch):
            num_to_come = task.num_blocks_to_come(kv_cache) + self.num_missing_cross_blocks(branch)
            if not kv_cache.load(branch, max_new_tokens, num_to_come):
                return Admission.NO_MEMORY
        elif (branch.choice == 0 and task.needs_every_prompt_row) or not kv_cache.load_prefix(
            branch, max_new_tokens, self._load_costs(branch)
        ):
            return None
        if branch.request.encoder_input is not None:
            kv_cache.load_cross(branch, branch.request.encoder_input)
        return Admission.LOADING if self._state.loads.wait(branch) else None

    def _load_costs(self, branch: Branch) -> SwapCosts | None:
        """Where nothing was measured at start-up, a block of host memory costs nothing, and a token what tokens took in
        steps so far. None where another engine has computed the blocks, so that this one need not."""
        if branch.request.receives_blocks:
            return None
        if self._state.swap_costs is not None:
            return self._state.swap_costs
        seconds = self._state.pace.seconds_of_token(min(branch.num_tokens, self._state.config.token_budget))
        return None if seconds is None else SwapCosts(0.0, seconds)

    def attach_cross(self, step: StepDraft, branch: Branch, may_load: bool = True) -> Admission:
        """Give the branch its cross table: an existing one, which is loaded from the block store if the branch may wait
        for that, or a new one that the encoder writes in this step. An input is never split; one that is longer than
        the budget runs alone."""
        encoder_input = branch.request.encoder_input
        if encoder_input is None or branch.cross is not None:
            return Admission.ADMITTED
        kv_cache = self._state.kv_cache
        runs = not kv_cache.has_cross(branch, encoder_input, may_load)
        if runs and not step.fits_encoder(encoder_input.num_positions):
            return Admission.NOT_NOW
        if not kv_cache.attach_cross(branch, encoder_input, may_load):
            return Admission.NO_MEMORY
        if runs:
            step.encoder_lengths.append(encoder_input.num_positions)
        return Admission.ADMITTED

    def num_missing_cross_blocks(self, branch: Branch) -> int:
        """Free blocks needed for the cross table of its encoder input, if no sequence holds it."""
        encoder_input = branch.request.encoder_input
        if encoder_input is None or branch.cross is not None:
            return 0
        return self._state.kv_cache.num_missing_cross_blocks(branch, encoder_input)
