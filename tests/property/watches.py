"""Invariants across steps, which no single plan shows: work that was done is not repeated."""

from __future__ import annotations

from collections import Counter

from hypothesis import event

from ratoon.core.adapters import Adapter
from ratoon.core.media import IMAGE
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreRequest
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.extraction import ExtractionTask
from ratoon.scheduling.scheduler import Scheduler


class SwapWatch:
    """A swapped-out branch resumes with what it had computed: a search with what its beams had, or with its prompt
    but for the last token, behind which they are computed again. One that lost its blocks in the store, by a transfer
    or a step that failed, is not swapped out any more."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._state = scheduler.state
        self._num_computed: dict[Branch, int] = {}
        self._swapped: dict[Branch, int] = {}  # with what each had computed

    def before_plan(self) -> None:
        branches, is_swapped = self._state.branches.values(), self._state.kv_cache.is_swapped
        resting = self._state.resting  # these compute their last token again
        self._num_computed = {branch: self._computed_of(branch) - (branch in resting) for branch in branches}
        self._swapped = {branch: count for branch, count in self._swapped.items() if is_swapped(branch)}

    def after_plan(self, plan: SchedulerOutput) -> None:
        num_restored = {step.req_id: step.num_restored_tokens for step in plan.beam_steps if step.num_tokens}
        for new in plan.scheduled_new_reqs:
            num_computed = self._swapped.pop(self._state.branches[new.req_id], None)
            if num_computed is None:
                continue
            event("beams swapped in" if new.req_id in num_restored else "swapped in")
            found = new.num_computed_tokens + num_restored.get(new.req_id, 0)
            assert found == num_computed, f"{new.req_id} came back with other tokens"
            assert (new.req_id in plan.num_scheduled_tokens) != (new.req_id in num_restored)
        for branch in self._state.branches.values():
            if self._state.kv_cache.is_swapped(branch) and branch not in self._swapped:
                assert not isinstance(branch.request.task, ExtractionTask)
                beams, num_computed = beams_of(branch), self._num_computed[branch]
                if beams is not None and beams.is_saved(self._state.kv_cache):
                    event("beams swapped out")
                    assert num_computed > branch.num_tokens
                elif beams is not None:
                    event("prompt of beams swapped out")
                    num_computed = min(num_computed, branch.num_tokens - 1)
                else:
                    event("swapped out")
                self._swapped[branch] = num_computed

    def _computed_of(self, branch: Branch) -> int:
        beams = beams_of(branch)
        tails = None if beams is None else beams._tails
        return branch.num_computed_tokens if tails is None else tails.num_computed_tokens


def beams_of(branch: Branch) -> BeamGroup | None:
    return branch.request.task if isinstance(branch.request.task, BeamGroup) else None


class EncoderWatch:
    """No input is run twice while what it became is there, named and findable."""

    def __init__(self, scheduler: Scheduler, requests: dict[str, EngineCoreRequest], max_positions: int) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._max_positions = max_positions  # in a step
        self._names: dict[bytes, int] = {}
        self._is_complete = scheduler.kv_cache.enable_caching  # False: something was lost, or is never kept
        self._runs: Counter[tuple[Adapter | None, str | None, bytes]] = Counter()
        self._num_reads = 0
        self._num_images = 0

    def after_plan(self, plan: SchedulerOutput) -> None:
        self._num_images += sum(media.modality == IMAGE for media in plan.scheduled_encoder_inputs.values())
        if not self._scheduler.kv_cache.has_cross_group:
            assert plan.encoder_steps == []
            return
        lengths = [step.encoder_input.num_positions for step in plan.encoder_steps]
        assert len(lengths) <= 1 or sum(lengths) <= self._max_positions
        for step in plan.encoder_steps:
            request = self._requests[step.req_id.split("#")[0]]
            if step.captured:
                self._num_reads += 1
            else:
                self._runs[request.adapter, request.cache_salt, step.encoder_input.content_hash] += 1
        self.look_for_losses()

    def look_for_losses(self) -> None:
        """Behind a failed step, too: what is lost with it may be named again, in the same block, by the next plan."""
        memory = self._scheduler.kv_cache
        if not memory.has_cross_group:
            return
        cached = memory.pool.cached_blocks(memory.num_groups)  # the cross group comes behind the others
        names = {name: block.block_id for name, block in cached.items()}
        self._is_complete = self._is_complete and self._names.items() <= names.items()
        self._names = names

    def check_end(self) -> None:
        assert self._scheduler.stats().num_encoder_runs == self._runs.total() + self._num_reads + self._num_images
        if self._runs and self._is_complete:
            event("no encoder input was lost")
            assert set(self._runs.values()) == {1}, "an encoder input ran twice"
        elif self._runs:
            event("an encoder input ran again" if max(self._runs.values()) > 1 else "encoder inputs were lost")
