"""The planner: which branches run in a step, with how many tokens, and who gives way when memory is short.

There are no phases. Every branch has a gap between its tokens and its computed tokens, and a step closes part of it
within a token budget. What becomes of a plan's results is in results.py.
"""

from __future__ import annotations

import enum

from ratoon.core.plan import MAX_CAPTURE_SPANS, BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from ratoon.core.request import InheritedFrom
from ratoon.memory.kv_cache_manager import GroupBlocks
from ratoon.scheduling.admission import max_step_tokens
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.branch import Branch, BranchStatus, Request, branch_seed
from ratoon.scheduling.extraction import AGED_SHARE, ExtractionState
from ratoon.scheduling.roster import Roster
from ratoon.scheduling.step_draft import StepDraft


class Admission(enum.Enum):
    """What came of the try to let a waiting branch in."""

    ADMITTED = enum.auto()
    NO_MEMORY = enum.auto()
    NOT_NOW = enum.auto()  # it does not fit into what is left of this step


class StepPlanner:
    def __init__(self, roster: Roster) -> None:
        self.max_step_tokens = max_step_tokens(roster.config)
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_scheduled_tokens = 0
        self._roster = roster
        # The tokens of a step that belong to an extraction that has waited for too long
        self._share_of_aged = max(1, roster.config.max_num_batched_tokens // AGED_SHARE)

    def plan(self) -> SchedulerOutput:
        """Running branches first, then waiting ones, then the plan."""
        step = StepDraft(self._roster.config.max_num_batched_tokens)
        if self._roster.on_trial:
            self._schedule_alone(step, next(iter(self._roster.on_trial.values())))
            return self._build_plan(step)
        self._schedule_running(step)
        if self._roster.extractions:
            self._schedule_newcomers_and_extractions(step)
        elif not step.preempted:  # if memory is short, whoever comes in now would be the next to go
            self._schedule_waiting(step)
        return self._build_plan(step)

    def _schedule_newcomers_and_extractions(self, step: StepDraft) -> None:
        """Generation first, then those who read hidden states out. One of these that was passed by too often has its
        share before everybody who waits, and if there is no room for it, nobody else gets any."""
        extractions = self._roster.extractions
        aged = extractions.aged
        most = self._share_of_aged if self._roster.waiting else step.budget
        if (aged is None or self._extract(step, aged, most)) and not step.preempted:
            self._schedule_waiting(step)
            self._schedule_extractions(step)
        if extractions.first is not None and not step.captures:
            extractions.first.num_passed_by += 1

    def _schedule_running(self, step: StepDraft) -> None:
        # This loop runs for every branch in every step. A decoding branch with room in its last block costs a few
        # attribute reads here; everything else is in _schedule_with_memory.
        take_in_place = step.in_place.append
        long_gaps: list[Branch] = []
        budget = step.budget
        for branch in self._roster.running.copy():  # preemption changes the list
            if budget <= 0:
                break
            num_tokens = branch.num_tokens
            gap = num_tokens - branch.num_computed_tokens
            if gap == 1 and num_tokens <= branch.write_limit:
                take_in_place(branch)
                budget -= 1
            elif gap == 1:
                step.budget = budget
                self._schedule_with_memory(step, branch, gap)
                budget = step.budget
            elif gap > 1:
                long_gaps.append(branch)
        step.budget = budget
        if self._roster.searching:
            self._schedule_searches(step)
        if long_gaps:
            self._schedule_prompts(step, long_gaps)

    def _schedule_prompts(self, step: StepDraft, long_gaps: list[Branch]) -> None:
        """Prompts take what single tokens leave, so that a long one does not silence everybody who came in after it,
        and leave their share to an extraction that has waited for too long."""
        held_back = 0 if self._roster.extractions.aged is None else min(step.budget, self._share_of_aged)
        step.budget -= held_back
        for branch in long_gaps:
            if step.budget > 0:
                self._schedule_with_memory(step, branch, branch.num_tokens - branch.num_computed_tokens)
        step.budget += held_back

    def _schedule_with_memory(self, step: StepDraft, branch: Branch, gap: int) -> None:
        """Give a running branch tokens and memory. If memory is short, the last in the order gives way, maybe itself.

        The first in the order thus always gets on, and since it fits into the pool alone, it ends.
        """
        if branch.status != BranchStatus.RUNNING:
            return  # it had to give way a moment ago
        num_new_tokens = gap if gap == 1 else min(gap, step.budget, self.max_step_tokens)
        while True:
            appended = self._roster.kv_cache.allocate_slots(branch, num_new_tokens)
            if appended is not None:
                step.add(branch, num_new_tokens, appended)
                return
            if self._make_room(step) is branch:
                return

    def _schedule_searches(self, step: StepDraft) -> None:
        """The budget has room for a token of every beam: beams have their rows from the start, and there are no more
        rows than that while any search runs. Beams that have to catch up take what the others leave."""
        ready = [group for group in self._roster.searching.values() if group.is_ready(self._roster.kv_cache)]
        held_back = sum(group.num_beams for group in ready)
        for group in ready:
            held_back -= group.num_beams
            self._schedule_beams(step, group, step.budget - held_back)

    def _schedule_beams(self, step: StepDraft, group: BeamGroup, budget: int) -> None:
        """As other branches, but the beams of a search run all or none."""
        if group.trunk.status != BranchStatus.RUNNING:
            return
        at_once = min(budget, self.max_step_tokens) // group.num_beams
        num_new_tokens = min(group.gap, max(1, at_once))  # more than one where beams lost their memory
        while not group.allocate(num_new_tokens):
            if not group.forget_kept() and self._make_room(step) is group.trunk:
                return
        step.add_beams(group, num_new_tokens)

    def _make_room(self, step: StepDraft) -> Branch | None:
        """Memory is short: what has ended gives way before anybody who runs, who reads hidden states before who
        generates, and of these the last in the order, who is returned."""
        if self._roster.leases.evict_one():
            return None
        extractions = self._roster.extractions
        if extractions.running and extractions.running[-1] is not extractions.aged:
            self._roster.set_back(extractions.running[-1].branch)
            return None
        tried = next(iter(self._roster.on_trial.values()), None)  # others give way to it, whatever their order
        others = [branch for branch in self._roster.running if branch.request is not tried]
        victim = max(others or self._roster.running, key=self._roster.order)
        self._preempt(step, victim)
        return victim

    def _preempt(self, step: StepDraft, branch: Branch) -> None:
        """Take a branch's memory. It will be computed again, as far as the prefix cache has not kept it."""
        step.remove(branch)
        step.preempted = True
        if branch.known_to_runner:
            step.dropped_rows.append(branch.branch_id)
        self._roster.running.remove(branch)
        self._roster.set_back(branch)
        self._roster.waiting.prepend(branch)
        self.num_preemptions += 1

    def _schedule_waiting(self, step: StepDraft) -> None:
        while self._roster.waiting and step.budget > 0 and self._roster.has_rows_for(self._roster.waiting.peek()):
            if not self._admit(step, self._roster.waiting.peek()):
                break  # nobody overtakes the first in the queue
            self._roster.waiting.pop()

    def _schedule_extractions(self, step: StepDraft) -> None:
        """Those that have begun, then those that wait, as long as there is room."""
        served = {state.branch for state, _ in step.captures}
        for state in list(self._roster.extractions):
            if state.branch not in served and not self._extract(step, state, step.budget):
                return

    def _extract(self, step: StepDraft, state: ExtractionState, most: int) -> bool:
        """Give an extraction `most` rows, and memory for those that are written. False: there is no room for it."""
        branch = state.branch
        budget = min(most, step.budget, self.max_step_tokens)
        max_spans = MAX_CAPTURE_SPANS - step.num_spans
        if budget <= 0 or max_spans <= 0:
            return False
        if branch.status != BranchStatus.RUNNING:
            self._begin_extraction(state)
        spans = state.next_spans(branch.num_computed_tokens, budget, max_spans)
        num_written = sum(count for _, count, is_written in spans if is_written)
        while num_written and self._roster.kv_cache.allocate_slots(branch, num_written) is None:
            if not self._make_room_for_extraction(step, state):
                if state is not self._roster.extractions.aged:  # that one keeps what it has, and waits for the rest
                    self._roster.set_back(branch)
                return False
        step.add_capture(state, spans)
        return True

    def _make_room_for_extraction(self, step: StepDraft, state: ExtractionState) -> bool:
        """Those that began later give way, so that the first always gets on; leases do where it has waited for long or
        is alone."""
        extractions = self._roster.extractions
        last = extractions.running[-1]
        if last is not state and all(last is not served for served, _ in step.captures):
            self._roster.set_back(last.branch)
            return True
        return (state is extractions.aged or step.is_empty) and self._roster.leases.evict_one()

    def _begin_extraction(self, state: ExtractionState) -> None:
        """Take what is there of its sequence by reference: all of it, unless a window has passed what rows read."""
        roster, branch = self._roster, state.branch
        most = state.next_position if roster.kv_cache.has_windows else branch.num_tokens
        num_settled = most
        parent = roster.branches.get(branch.request.continuation_of or "")
        if parent is not None:  # it runs, and may write to its last block in this very step
            num_full_blocks = parent.num_computed_tokens // roster.kv_cache.block_size
            num_settled = min(most, num_full_blocks * roster.kv_cache.block_size)
        num_inherited = self._inherit(branch, num_settled, num_left=0)
        if not num_inherited:
            hit_blocks, num_hit_tokens = roster.kv_cache.get_computed_blocks(branch, most)
            roster.kv_cache.allocate_slots(branch, 0, hit_blocks, num_hit_tokens)
            branch.num_computed_tokens = num_hit_tokens
        if branch.status == BranchStatus.WAITING:
            branch.num_cached_tokens = branch.num_computed_tokens
            self._note_inheritance(branch, num_inherited)
        branch.status = BranchStatus.RUNNING
        roster.extractions.begin(state)

    def _schedule_alone(self, step: StepDraft, request: Request) -> None:
        """One request, whatever its place in the order. If memory or rows are short, others give way."""
        for state in reversed(self._roster.extractions.running.copy()):
            if state.branch.request is not request:
                self._roster.set_back(state.branch)
        if request.extraction is not None:
            while not self._extract(step, request.extraction, step.budget):
                if not self._preempt_another(step, request):
                    return
            return
        for branch in request.branches:
            if step.budget <= 0:
                return
            if branch.status == BranchStatus.RUNNING:
                gap = branch.num_tokens - branch.num_computed_tokens
                if gap:
                    self._schedule_with_memory(step, branch, gap)
                elif request.beams is not None and request.beams.is_ready(self._roster.kv_cache):
                    self._schedule_beams(step, request.beams, step.budget)
            elif branch.status != BranchStatus.FINISHED:
                while not self._roster.has_rows_for(branch) or not self._admit(step, branch):
                    if not self._preempt_another(step, request):
                        return
                self._roster.waiting.remove({branch})

    def _preempt_another(self, step: StepDraft, request: Request) -> bool:
        """The last in the order who runs beside this request loses his memory. False: nobody does."""
        others = [other for other in self._roster.running if other.request is not request]
        if others:
            self._preempt(step, max(others, key=self._roster.order))
        return bool(others)

    def _admit(self, step: StepDraft, branch: Branch) -> bool:
        """Let a branch in, if it fits. Leases give way to it, where that is enough."""
        while True:
            admission = self._try_to_admit(step, branch)
            if admission != Admission.NO_MEMORY:
                return admission == Admission.ADMITTED
            num_wanted = self._roster.kv_cache.required_blocks(min(branch.num_tokens, self.max_step_tokens))
            if branch.request.beams is not None:
                num_wanted += branch.request.beams.num_blocks_to_come(self._roster.kv_cache)
            if self._roster.kv_cache.num_free_blocks + self._roster.leases.num_reclaimable_blocks() < num_wanted:
                return False
            if not self._roster.leases.evict_one():
                return False

    def _try_to_admit(self, step: StepDraft, branch: Branch) -> Admission:
        hit_blocks: GroupBlocks | None = None
        num_inherited = num_hit_tokens = self._inherit(branch, branch.request.num_inheritable_tokens)
        if not num_inherited:
            hit_blocks, num_hit_tokens = self._find_computed_prefix(branch)
        gap = branch.num_tokens - num_hit_tokens
        num_new_tokens = min(gap, step.budget, self.max_step_tokens)
        fits_step = num_new_tokens == gap or self._may_split(gap)
        appended = None
        if fits_step and self._has_memory_for_beams(branch, num_hit_tokens, hit_blocks):
            num_found_tokens = num_hit_tokens - num_inherited  # what is inherited is in its tables already
            appended = self._roster.kv_cache.allocate_slots(branch, num_new_tokens, hit_blocks, num_found_tokens)
        if appended is None:
            if num_inherited:
                self._roster.kv_cache.free(branch)
            return Admission.NO_MEMORY if fits_step else Admission.NOT_NOW
        self._roster.running.append(branch)
        if branch.status == BranchStatus.WAITING:  # its first time; what a resumed branch finds is its own work
            branch.num_cached_tokens = num_hit_tokens
            if hit_blocks is not None:
                self._roster.kv_cache.count_lookup(branch.num_tokens, num_hit_tokens)
            self._note_inheritance(branch, num_inherited)
        branch.status = BranchStatus.RUNNING
        branch.num_computed_tokens = num_hit_tokens
        step.add(branch, num_new_tokens, appended)
        return Admission.ADMITTED

    def _has_memory_for_beams(self, branch: Branch, num_hit_tokens: int, hit_blocks: GroupBlocks | None) -> bool:
        """A search that has memory for its prompt alone would lose it again as soon as the prompt is computed."""
        beams = branch.request.beams
        if beams is None:
            return True
        missing = self._roster.kv_cache.missing_blocks(
            branch.num_tokens, num_hit_tokens, hit_blocks, self.max_step_tokens
        )
        return missing + beams.num_blocks_to_come(self._roster.kv_cache) <= self._roster.kv_cache.num_free_blocks

    def _inherit(self, branch: Branch, most: int, num_left: int = 1) -> int:
        """Give a continuation its parent's memory, where that is kept or still runs. How many tokens it has then."""
        request = branch.request
        if request.continuation_of is None or branch.choice != 0 or request.needs_every_prompt_row:
            return 0
        parent = self._roster.leases.find(request.continuation_of) or self._roster.branches.get(request.continuation_of)
        if parent is None:
            return 0
        return self._roster.kv_cache.inherit_blocks_from_parent(parent, branch, most, num_left)

    def _note_inheritance(self, branch: Branch, num_inherited: int) -> None:
        request = branch.request
        if request.continuation_of is None:
            return
        self._roster.leases.continuation_left(request.continuation_of, request.request_id)
        if num_inherited:
            self._roster.leases.stats.continued += 1
            source = InheritedFrom.LEASE
        else:
            source = InheritedFrom.PREFIX_CACHE if branch.num_cached_tokens else InheritedFrom.RECOMPUTED
        self._roster.inherited[request.request_id] = source

    def _find_computed_prefix(self, branch: Branch) -> tuple[GroupBlocks | None, int]:
        # Log-probabilities of the prompt and means over it need every prompt row computed: there is nothing to look up.
        if branch.choice == 0 and branch.request.needs_every_prompt_row:
            return None, 0
        return self._roster.kv_cache.get_computed_blocks(branch)

    def _may_split(self, gap: int) -> bool:
        """With chunked prefill off a prompt runs whole. A branch that grew beyond the budget and was then preempted has
        no other way back in than in parts."""
        return self._roster.config.enable_chunked_prefill or gap > self._roster.config.max_num_batched_tokens

    def _build_plan(self, step: StepDraft) -> SchedulerOutput:
        """Write the draft down as a diff for the runner, and count the scheduled tokens as computed."""
        in_place = step.in_place
        known = CachedRequestData(
            [branch.branch_id for branch in in_place],
            [branch.num_computed_tokens for branch in in_place],
            [None] * len(in_place),
        )
        plan = SchedulerOutput(
            scheduled_cached_reqs=known,
            num_scheduled_tokens=dict.fromkeys(known.req_ids, 1),
            total_num_scheduled_tokens=self._roster.config.max_num_batched_tokens - step.budget,
            sampled_req_ids=known.req_ids.copy(),
            block_copies=self._roster.kv_cache.take_block_copies(),
            finished_req_ids=self._roster.finished_rows,
            preempted_req_ids=step.dropped_rows,
        )
        self._roster.finished_rows = []
        for branch in in_place:
            branch.num_computed_tokens += 1
        for branch, num_new_tokens, appended in step.allocated:
            self._write_down(plan, branch, num_new_tokens, appended)
        for state, spans in step.captures:
            plan.captures.append(state.take_step(spans, self._roster.kv_cache.block_ids(state.branch)))
            state.branch.num_computed_tokens += sum(count for _, count, is_written in spans if is_written)
        plan.beam_steps += [group.take_step(num_new_tokens) for group, num_new_tokens in step.beams]
        self.num_steps += 1
        self.num_scheduled_tokens = plan.total_num_scheduled_tokens
        return plan

    def _write_down(self, plan: SchedulerOutput, branch: Branch, num_new_tokens: int, appended: BlockIds) -> None:
        branch_id = branch.branch_id
        plan.num_scheduled_tokens[branch_id] = num_new_tokens
        if branch.known_to_runner:
            known = plan.scheduled_cached_reqs
            known.req_ids.append(branch_id)
            known.num_computed_tokens.append(branch.num_computed_tokens)
            known.new_block_ids.append(appended if any(appended) else None)
        else:
            plan.scheduled_new_reqs.append(self._new_request_data(branch))
            branch.known_to_runner = True
        branch.num_computed_tokens += num_new_tokens
        if branch.num_computed_tokens < branch.num_tokens:
            branch.write_limit = 0  # the end of a prompt must come through here, for it may fork
            return
        request = branch.request
        if request.pooling_params is not None:
            plan.pooled_req_ids.append(branch_id)
            return
        if request.beams is not None:
            first_step = request.beams.first_step()
            if first_step is not None:
                plan.beam_steps.append(first_step)
            return
        plan.sampled_req_ids.append(branch_id)
        if not request.forked:
            request.forked = True
            plan.fanout[branch_id] = [
                (request.branch_ids[choice], branch_seed(request.params.seed, request.request_id, choice))
                for choice in range(1, request.num_choices)
            ]

    def _new_request_data(self, branch: Branch) -> NewRequestData:
        return NewRequestData(
            req_id=branch.branch_id,
            token_ids=branch.token_ids.copy(),
            num_prompt_tokens=branch.num_prompt_tokens,
            sampling_params=branch.sampling_params,
            seed=branch.seed,
            block_ids=self._roster.kv_cache.block_ids(branch),
            num_computed_tokens=branch.num_computed_tokens,
            pooling_params=branch.request.pooling_params,
        )
