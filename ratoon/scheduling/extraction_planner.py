"""Plans extractions of hidden states: when each runs, which rows of it, and who gives way when memory is short.

Generation goes first; one that was passed by too often has a share of its own. What is left of an extraction is in
extraction.py.
"""

from __future__ import annotations

from ratoon.core.plan import MAX_CAPTURE_SPANS
from ratoon.scheduling.admission import max_step_tokens
from ratoon.scheduling.beginnings import Admission, Beginnings
from ratoon.scheduling.branch import BranchStatus
from ratoon.scheduling.extraction import AGED_SHARE, ExtractionState
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft


class ExtractionPlanner:
    def __init__(self, state: SchedulerState, beginnings: Beginnings) -> None:
        self._state = state
        self._beginnings = beginnings
        self._max_step_tokens = max_step_tokens(state.config)
        # The tokens of a step that belong to an extraction that has waited for too long
        self._share_of_aged = max(1, state.config.max_num_batched_tokens // AGED_SHARE)

    def held_back(self, step: StepDraft) -> int:
        """What prompts leave to one that has waited for too long: not all, for it may wait for memory of theirs."""
        if self._state.extractions.aged is None:
            return 0
        return min(max(step.budget - 1, 0), self._share_of_aged)

    def serve_aged(self, step: StepDraft) -> bool:
        """One that was passed by too often has its share before everybody who waits. False: there is no room for it,
        and nobody else should get any."""
        aged = self._state.extractions.aged
        if aged is None:
            return True
        takes_all = self._state.config.whole_prompts or not self._state.waiting
        return self.extract(step, aged, step.budget if takes_all else self._share_of_aged)

    def serve(self, step: StepDraft) -> None:
        """Those that have begun, then those that wait, as long as there is room."""
        served = {state.branch for state, _ in step.captures} | {state.branch for state in step.encoder_reads}
        for state in list(self._state.extractions):
            if state.branch not in served and not self.extract(step, state, step.budget):
                return

    def note_passed_by(self, step: StepDraft) -> None:
        first = self._state.extractions.first
        if first is not None and not step.captures and not step.encoder_reads:
            first.num_passed_by += 1

    def extract(self, step: StepDraft, state: ExtractionState, most: int) -> bool:
        """Give an extraction `most` rows, and memory for those that are written. False: there is no room for it."""
        if state.extraction.of_encoder:
            return self._read_encoder(step, state)
        branch = state.branch
        budget = min(most, step.budget, self._max_step_tokens)
        max_spans = MAX_CAPTURE_SPANS - step.num_spans
        if budget <= 0 or max_spans <= 0:
            return False
        begins, num_encoder_inputs = branch.status != BranchStatus.RUNNING, len(step.encoder_lengths)
        if begins and not self._begin(step, state):
            return False
        spans = state.next_spans(branch.num_computed_tokens, budget, max_spans)
        num_written = sum(count for _, count, is_written in spans if is_written)
        if self._state.config.whole_prompts and num_written < branch.num_tokens:
            self._state.set_back(branch)
            return False
        while num_written and self._state.kv_cache.allocate_slots(branch, num_written) is None:
            if not self._make_room(step, state):
                # The aged one keeps what it has, and waits for the rest, but not what only this step will write: it
                # is not in it, and would not be told that the step has failed.
                if begins or state is not self._state.extractions.aged:
                    self._state.set_back(branch)
                    del step.encoder_lengths[num_encoder_inputs:]
                return False
        if begins:
            self._state.events.scheduled(branch, self._state.now)
        step.add_capture(state, spans)
        return True

    def _read_encoder(self, step: StepDraft, state: ExtractionState) -> bool:
        """States of the encoder are kept nowhere: it runs, whole, and needs no memory."""
        encoder_input = state.branch.request.encoder_input
        assert encoder_input is not None
        if not step.fits_encoder(encoder_input.num_positions):
            return False
        if state.branch.status != BranchStatus.RUNNING:
            state.branch.status = BranchStatus.RUNNING
            self._state.extractions.begin(state)
            self._state.events.scheduled(state.branch, self._state.now)
        step.encoder_lengths.append(encoder_input.num_positions)
        step.encoder_reads.append(state)
        return True

    def _begin(self, step: StepDraft, state: ExtractionState) -> bool:
        """Take what is there of its sequence by reference: all of it, unless a window has passed what rows read."""
        scheduler_state, branch = self._state, state.branch
        most = state.next_position if scheduler_state.kv_cache.has_windows else branch.num_tokens
        num_settled = most
        parent = scheduler_state.branches.get(branch.request.continuation_of or "")
        if parent is not None:  # it runs, and may write to its last block in this very step
            num_full_blocks = parent.num_computed_tokens // scheduler_state.kv_cache.block_size
            num_settled = min(most, num_full_blocks * scheduler_state.kv_cache.block_size)
        num_inherited = self._beginnings.inherit(branch, num_settled, num_left=0)
        while (found := self._beginnings.attach_cross(step, branch)) == Admission.NO_MEMORY:
            if not self._make_room(step, state):
                break
        if found != Admission.ADMITTED:
            scheduler_state.kv_cache.free(branch)
            return False
        if not num_inherited:
            hit_blocks, num_hit_tokens = scheduler_state.kv_cache.get_computed_blocks(branch, most)
            scheduler_state.kv_cache.allocate_slots(branch, 0, hit_blocks, num_hit_tokens)
            branch.num_computed_tokens = num_hit_tokens
        if branch.status == BranchStatus.WAITING:
            branch.num_cached_tokens = branch.num_computed_tokens
            self._beginnings.note_inheritance(branch, num_inherited)
        branch.status = BranchStatus.RUNNING
        scheduler_state.extractions.begin(state)
        return True

    def _make_room(self, step: StepDraft, state: ExtractionState) -> bool:
        """Those that began later give way, so that the first always gets on; leases do where it has waited for long or
        is alone."""
        extractions = self._state.extractions
        last = extractions.running[-1] if extractions.running else state
        is_served = any(last is served for served, _ in step.captures) or last in step.encoder_reads
        if last is not state and state in extractions.running and not is_served:
            self._state.set_back(last.branch)
            return True
        return (state is extractions.aged or step.is_empty) and self._state.leases.evict_one()
