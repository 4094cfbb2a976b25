"""The planner: which branches run in a step, with how many tokens, and which are preempted for memory.

There are no phases. Every branch has a gap between its tokens and its computed tokens, and a step closes part of it
within a token budget. results.py applies a plan's results.
"""

from __future__ import annotations

from collections import Counter

from ratoon.core.plan import BlockIds, CachedRequestData, EncoderStep, SchedulerOutput
from ratoon.memory.kv_cache_manager import GroupBlocks
from ratoon.scheduling.branch import Branch, BranchStatus, Request
from ratoon.scheduling.kinds.registry import Kinds
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.shared_prefills import Admission, SharedPrefills
from ratoon.scheduling.shares import Owner
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import NO_LIMIT, StepDraft
from ratoon.scheduling.turns import StepShares, Turns


class StepPlanner:
    def __init__(self, state: SchedulerState, kinds: Kinds, beginnings: SharedPrefills, preemption: Preemption) -> None:
        self.num_steps = 0
        self.num_scheduled_tokens = 0
        self.num_encoder_runs = 0  # encoder inputs, since the start
        self._state = state
        self._kinds = kinds
        self._beginnings = beginnings
        self._preemption = preemption
        self._turns = Turns(state.pace, state.config.token_budget)
        self._writes_tokens = state.config.max_steps_of_branch is not None

    def plan(self) -> SchedulerOutput:
        """Running branches first, then waiting ones, then the plan."""
        was_drained = self._state.wants_drain
        if self._state.may_take_memory:
            self._state.wants_drain = False
        self._state.adapters.begin_loads(self._state.now)
        step = StepDraft(self._state.config.token_budget, self._state.config.max_num_encoder_tokens)
        if self._state.config.num_rounds > 1 and not was_drained:
            step.max_decodes = -(-len(self._state.running) // self._state.config.num_rounds)
        if self._state.resting:
            self._state.end_rests(early=bool(self._state.quarantined) or self._all_rest())
        if self._state.quarantined:
            self._schedule_alone(step, next(iter(self._state.quarantined.values())))
            return self._build_plan(step)
        self._share_out(step)
        self._fill(step)
        if step.shares is not None:
            self._close_shares(step, step.shares)
        if step.is_empty and not self._state.in_flight:
            self._fill_empty(step)
        for kind in self._kinds.with_rows:
            kind.close(step)
        return self._build_plan(step)

    def _fill_empty(self, step: StepDraft) -> None:
        """Nothing was planned, and nothing else runs: plan what was left to later steps."""
        is_left = step.max_decodes < NO_LIMIT
        step.max_decodes = NO_LIMIT
        if self._state.resting:  # the others have given way to these
            self._state.end_rests(early=True)
            is_left = True
        if is_left:
            self._schedule_running(step)

    def _fill(self, step: StepDraft) -> None:
        self._schedule_running(step)
        if self._state.shares.contended:
            self._charge(step)
        self._schedule_waiting_and_kinds(step)
        if step.preempted_for_share and step.is_empty:  # for a branch that did not fit after all
            self._schedule_running(step)

    # ---- steps that owners share ----

    def _share_out(self, step: StepDraft) -> None:
        """Give each owner its part of the step, if several have requests or had some recently."""
        state = self._state
        others_return = state.shares.others_return(state.now)
        if not (state.shares.contended or others_return) or not state.config.enable_chunked_prefill:
            self._turns.end()
            return
        wants = self._wanted_tokens()
        if wants:
            others_return = others_return or len(wants) < state.shares.num_owners
            step.shares = self._turns.share_out(wants, state.shares.served, others_return)

    def _wanted_tokens(self) -> Counter[Owner]:
        """The tokens that each owner could run in this step, up to the whole budget."""
        state, most = self._state, self._state.config.token_budget
        wants: Counter[Owner] = Counter()
        for branch in state.running:
            wants[branch.request.owner] += max(_gap_of(branch), 0) + len(branch.draft_tokens)  # less while checked
        for trunk in state.all_or_none.values():
            if trunk.status == BranchStatus.RUNNING and trunk.num_computed_tokens == trunk.num_tokens:
                wants[trunk.request.owner] += trunk.num_rows
        for kind in self._kinds.with_rows:
            for owner, num_tokens in kind.wanted_tokens():
                wants[owner] += num_tokens
        for owner in state.waiting.owners():
            for branch in state.waiting.of_owner(owner):
                if wants[owner] >= most:
                    break
                wants[owner] += branch.num_tokens
        return Counter({owner: min(count, most) for owner, count in wants.items() if count > 0})

    def _close_shares(self, step: StepDraft, shares: StepShares) -> None:
        """Owners whose branches all had their turns, and that have tokens left, begin the next round in this step."""
        state = self._state
        if self._turns.begin_anew(shares):
            for branch in state.running:
                may_run = _gap_of(branch) == 1 and step.may_decode and step.may_run(branch)
                runs = may_run and self._decode_if_fits(step, branch)
                if runs and state.shares.contended:
                    state.shares.charge(branch.request.owner, 1)
        self._turns.close(shares)
        if step.is_empty:  # those that may run can't
            step.shares = None
            self._fill(step)

    def _decode_if_fits(self, step: StepDraft, branch: Branch) -> bool:
        """One token of a branch, without preemption: what would be preempted may be in the step already."""
        if branch.num_tokens + branch.num_pending <= branch.write_limit:
            step.add_in_place(branch)
            return True
        if branch.waits_to_draft and branch.num_pending:
            return False
        if branch.num_computed_tokens < branch.media_end:
            return False  # the end of a prompt, which may need a run of the encoder
        appended = self._state.kv_cache.allocate_slots(branch, 1)
        if appended is not None:
            step.add(branch, 1, appended)
        return appended is not None

    def _decode(self, step: StepDraft, branch: Branch) -> None:
        """One token of a running branch, if it is its turn."""
        if not step.may_run(branch):
            return
        if branch.num_tokens + branch.num_pending <= branch.write_limit:
            step.add_in_place(branch)
        else:
            self._schedule_with_memory(step, branch, 1)

    # ---- what runs ----

    def _all_rest(self) -> bool:
        """Whether there is nothing to do for running branches but for those that rest."""
        state = self._state
        return not state.in_flight and all(
            branch in state.resting or branch.num_tokens == branch.num_computed_tokens for branch in state.running
        )

    def _schedule_waiting_and_kinds(self, step: StepDraft) -> None:
        """Admit waiting branches, then rows of kinds that yield to generation, unless they waited too long."""
        kinds, has_room = self._kinds.with_rows, not step.preempted
        for kind in kinds:
            has_room = kind.plan_early(step) and has_room
        if has_room:  # if memory is short, a newly admitted branch would be preempted next
            self._schedule_waiting(step)
            for kind in kinds:
                kind.plan_late(step)

    def _schedule_running(self, step: StepDraft) -> None:
        long_gaps = self._decode_all(step) if step.shares is None else self._decode_in_turns(step)
        for kind in self._kinds.with_rows:
            kind.plan_running(step)
        if long_gaps:
            self._schedule_prompts(step, long_gaps)

    def _decode_in_turns(self, step: StepDraft) -> list[Branch]:
        """Plans decoding branches, as `_decode_all` does, for owners that share the step."""
        long_gaps: list[Branch] = []
        for branch in self._state.running.copy():
            gap = _gap_of(branch)
            if gap == 1 and step.may_decode:
                self._decode(step, branch)
            elif gap > 1:
                long_gaps.append(branch)
        return long_gaps

    def _decode_all(self, step: StepDraft) -> list[Branch]:
        """One token of each decoding branch. Returns those with more to compute."""
        # This loop runs for every branch in every step. A decoding branch with room in its last block costs a few
        # attribute reads here; everything else is in _schedule_with_memory.
        take_in_place = step.in_place.append
        long_gaps: list[Branch] = []
        budget, num_left = step.budget, step.max_decodes
        for branch in self._state.running.copy():  # preemption changes the list
            if budget <= 0:
                break
            num_tokens = branch.num_tokens + branch.num_pending
            gap = num_tokens - branch.num_computed_tokens
            if gap == 1 and num_tokens <= branch.write_limit and num_left:
                take_in_place(branch)
                budget -= 1
                num_left -= 1
            elif gap == 1 and num_left:
                step.budget, num_before = budget, len(step.allocated)
                self._schedule_with_memory(step, branch, gap)
                budget = step.budget
                num_left -= len(step.allocated) - num_before  # one that got no memory leaves its place to the next
            elif gap > 1:
                long_gaps.append(branch)
        step.budget = budget
        return long_gaps

    def _schedule_prompts(self, step: StepDraft, long_gaps: list[Branch]) -> None:
        """Prompts take what decoding leaves, so that a long one does not stall later branches, and leave a share to a
        kind that waited too long."""
        held_back = [held for kind in self._kinds.with_rows if (held := kind.held_back(step)) is not None]
        for owner, num_tokens in held_back:
            step.hold(owner, num_tokens)
        for branch in long_gaps:
            if step.room(branch.request.owner) > 0:
                self._schedule_with_memory(step, branch, branch.num_tokens - branch.num_computed_tokens)
        for owner, num_tokens in held_back:
            step.hold(owner, -num_tokens)

    def _schedule_with_memory(self, step: StepDraft, branch: Branch, gap: int) -> None:
        """Give a running branch tokens and memory. If memory is short, the last in the order is preempted.

        The first in the order thus always makes progress, and since it fits into the pool alone, it finishes.
        """
        if branch.status != BranchStatus.RUNNING:
            return  # it was just preempted
        if branch.waits_to_draft and branch.num_pending:
            return
        num_new_tokens = gap if gap == 1 else self._part_of(gap, step, branch)
        if branch.num_computed_tokens < branch.media_end:
            num_new_tokens = self._fit_media(step, branch, branch.num_computed_tokens, num_new_tokens)
            if not num_new_tokens:
                return self._state.media.settle(branch)
        if branch.draft_tokens and num_new_tokens == gap:
            num_new_tokens += self._num_drafts(step, branch, gap)
        num_lookahead = self._num_lookahead(step, branch, num_new_tokens) if branch.num_to_draft else 0
        if branch.request.kv_transfer is not None:  # what earlier plans computed, before a window gives some of it back
            self._state.kv_cache.send_blocks(branch, branch.request.kv_transfer)
        while True:
            appended = self._state.kv_cache.allocate_slots(branch, num_new_tokens, num_lookahead_tokens=num_lookahead)
            if appended is not None:
                step.add(branch, num_new_tokens, appended)
                return
            if num_lookahead:
                num_lookahead = 0
            elif num_new_tokens > gap:
                num_new_tokens = gap  # nothing is preempted for drafts
            elif self._preemption.make_room(step, branch) is branch:
                if branch.media_end:
                    self._state.media.settle(branch)
                return

    def _num_drafts(self, step: StepDraft, branch: Branch, gap: int) -> int:
        """The drafts of a branch that its next step checks: as many as fit, without the tokens and blocks that other
        branches and beams are about to need. A branch that waits for a token, or for its first one, checks none."""
        if branch.num_pending or not branch.num_output_tokens:
            return 0
        state = self._state
        num_others = state.num_running_rows - len(step.in_place) - len(step.allocated) - 1
        room = min(step.budget - num_others, step.room_for(branch), state.max_step_tokens) - gap
        # Behind the last draft comes a token of its own.
        num_drafts = min(len(branch.draft_tokens), room, branch.max_total_tokens - branch.num_tokens - 1)
        num_blocks = state.kv_cache.num_groups * (num_others + 1) + state.kv_cache.required_blocks(num_drafts)
        return num_drafts if num_drafts > 0 and num_blocks <= state.kv_cache.num_free_blocks else 0

    def _num_lookahead(self, step: StepDraft, branch: Branch, num_new_tokens: int) -> int:
        """Slots behind the tokens of this step, in which the device drafts: none that others are about to need."""
        kv_cache, state = self._state.kv_cache, self._state
        end = branch.num_computed_tokens + num_new_tokens
        num_lookahead = min(branch.num_to_draft, branch.max_total_tokens - end)
        num_others = state.num_running_rows - len(step.in_place) - len(step.allocated) - 1
        num_blocks = kv_cache.num_groups * (num_others + 1) + kv_cache.required_blocks(num_new_tokens + num_lookahead)
        return num_lookahead if num_lookahead > 0 and num_blocks <= kv_cache.num_free_blocks else 0

    def _schedule_waiting(self, step: StepDraft) -> None:
        state = self._state
        num_running = len(state.running)  # branches admitted now come after them, and are not preempted
        while state.waiting and step.budget > 0:
            branch = state.waiting.peek() if step.shares is None else state.waiting.peek_among(step.has_room)
            if branch is None or branch in step.preempted_for_share or branch.branch_id in step.dropped_rows:
                break  # what was preempted in this step is not resumed in it
            has_rows = state.has_rows_for(branch)
            budget = step.budget
            admission = self._admit(step, branch) if has_rows else Admission.NOT_NOW
            if admission in (Admission.ADMITTED, Admission.LOADING):
                state.waiting.take(branch)
                if state.shares.contended:
                    state.shares.charge(branch.request.owner, budget - step.budget)
            elif has_rows and admission == Admission.NOT_NOW:
                break  # the first in the queue is not overtaken
            elif not self._preemption.preempt_beyond_share(step, branch, state.running[:num_running]):
                break
            else:
                num_running -= 1

    def _charge(self, step: StepDraft) -> None:
        """Count what owners got so far in this step; later admissions are counted as they happen."""
        charge = self._state.shares.charge
        for owner, count in Counter(branch.request.owner for branch in step.in_place).items():
            charge(owner, count)
        for branch, num_tokens, _ in step.allocated:
            charge(branch.request.owner, num_tokens)
        for rows in step.rows:
            charge(rows.branch.request.owner, rows.num_tokens)

    def _schedule_alone(self, step: StepDraft, request: Request) -> None:
        """Plan one request, regardless of the order. If memory or rows are short, others are preempted."""
        for kind in self._kinds.all:
            kind.preempt_others(request)
        if self._kinds.of(request).plan_alone(step, request):
            return
        for branch in request.branches:
            if step.budget <= 0:
                return
            if branch.status == BranchStatus.RUNNING:
                gap = branch.num_tokens - branch.num_computed_tokens
                while gap:
                    self._schedule_with_memory(step, branch, gap)
                    # Outputs of the encoder that others hold may leave no room for its images.
                    is_left_out = branch.num_computed_tokens < branch.media_end and not step.rows_of(branch)
                    if not is_left_out or not self._preemption.preempt_another(step, request):
                        break
            elif branch.status != BranchStatus.FINISHED:
                there = (Admission.ADMITTED, Admission.LOADING)
                while not self._state.has_rows_for(branch) or self._admit(step, branch) not in there:
                    if not self._preemption.preempt_another(step, request):
                        return
                self._state.waiting.remove({branch})

    def _admit(self, step: StepDraft, branch: Branch) -> Admission:
        """Admit a branch, if it fits. Texts that wait to be read give way to it, and leases are evicted for it, if that
        is enough."""
        leases = self._state.leases
        while True:
            admission = self._try_to_admit(step, branch)
            if admission != Admission.NO_MEMORY:
                return admission
            if self._state.may_take_memory and (
                self._state.readings.free_one() or self._state.loads.free_one(sparing=branch)
            ):
                continue
            spared = self._state.spared_owners(branch)
            num_at_most = self._state.kv_cache.num_free_blocks + leases.num_reclaimable_blocks(spared)
            if num_at_most < self._num_wanted_blocks(branch):
                return Admission.NO_MEMORY
            if not self._state.may_take_memory:
                self._state.wants_drain = self._state.wants_drain or len(leases) > 0
                return Admission.NO_MEMORY
            if not leases.evict_one(spared):
                return Admission.NO_MEMORY

    def _num_wanted_blocks(self, branch: Branch) -> int:
        """Blocks that must be free before a branch is admitted."""
        kv_cache = self._state.kv_cache
        if branch.block_tables:  # loaded already
            num_wanted = 0
        elif kv_cache.is_swapped(branch):
            num_wanted = kv_cache.num_blocks_to_swap_in(branch)
        else:
            num_wanted = kv_cache.required_blocks(min(branch.num_tokens, self._state.max_step_tokens))
        num_wanted += self._beginnings.num_missing_cross_blocks(branch)
        return num_wanted + branch.request.task.num_blocks_to_come(kv_cache)

    def _try_to_admit(self, step: StepDraft, branch: Branch) -> Admission:
        kv_cache = self._state.kv_cache
        hit_blocks: GroupBlocks | None = None
        num_encoder_inputs, num_inherited = len(step.encoder_lengths), 0
        if not branch.block_tables and not kv_cache.is_swapped(branch):
            num_inherited = self._beginnings.inherit(branch, branch.request.num_inheritable_tokens)
        if kv_cache.has_tier and not branch.block_tables:
            loading = self._beginnings.load(branch, self._part_of(step.budget, step, branch))
            if loading is not None:
                return loading
        is_held, had_cross = bool(branch.block_tables) and not num_inherited, branch.cross is not None
        num_hit_tokens = branch.num_computed_tokens
        # Before the prefix lookup: hits are not referenced yet, and this allocation may evict them.
        attached = self._beginnings.attach_cross(step, branch)
        if attached == Admission.ADMITTED and kv_cache.is_arriving(branch):
            self._state.loads.wait(branch)
            return Admission.LOADING
        if attached == Admission.ADMITTED and kv_cache.is_swapped(branch):
            resumed = self._kinds.of(branch.request).resume(step, branch)
            if resumed == Admission.ADMITTED:
                return resumed
            attached = resumed or attached
        if attached == Admission.ADMITTED and not num_hit_tokens:
            hit_blocks, num_hit_tokens = self._beginnings.find_prefix(branch)
        gap = branch.num_tokens - num_hit_tokens
        num_new_tokens = self._part_of(gap, step, branch)
        if attached == Admission.ADMITTED and num_hit_tokens < branch.media_end:
            num_new_tokens = self._fit_media(step, branch, num_hit_tokens, num_new_tokens, may_cut=self._may_split(gap))
        fits_step = num_new_tokens == gap or (num_new_tokens > 0 and self._may_split(gap))
        appended = None
        if attached == Admission.ADMITTED:
            attached = Admission.NO_MEMORY if fits_step else Admission.NOT_NOW
            if fits_step and self._has_memory_to_come(branch, num_hit_tokens, hit_blocks):
                num_found_tokens = num_hit_tokens - branch.num_computed_tokens  # of blocks that it does not hold yet
                appended = kv_cache.allocate_slots(branch, num_new_tokens, hit_blocks, num_found_tokens)
        if appended is None:
            if branch.media_end:
                self._state.media.cache.release(branch)
            if not is_held:
                kv_cache.free(branch)
                self._state.loads.forget(branch)
            elif not had_cross:
                kv_cache.free_cross(branch)
            del step.encoder_lengths[num_encoder_inputs:]
            return attached
        kv_cache.resumed(branch)
        self._state.loads.forget(branch)
        self._state.running.append(branch)
        if branch.status == BranchStatus.WAITING:  # first admission; a resumed branch finds its own blocks
            branch.num_cached_tokens = num_hit_tokens
            if hit_blocks is not None or num_hit_tokens:  # inherited and loaded tokens count as hits too
                self._state.kv_cache.prefix_cache.count_lookup(branch.num_tokens, num_hit_tokens)
            self._beginnings.note_inheritance(branch, num_inherited)
        branch.status = BranchStatus.RUNNING
        branch.first_step = self._state.next_step
        branch.num_computed_tokens = num_hit_tokens
        self._state.events.scheduled(branch, self._state.now)
        step.add(branch, num_new_tokens, appended)
        return Admission.ADMITTED

    def _has_memory_to_come(self, branch: Branch, num_hit_tokens: int, hit_blocks: GroupBlocks | None) -> bool:
        """A branch with memory for its prompt only, that needs more afterwards, would be preempted as soon as the
        prompt is computed."""
        kv_cache = self._state.kv_cache
        num_to_come = branch.request.task.num_blocks_to_come(kv_cache)
        if not num_to_come:
            return True
        missing = kv_cache.missing_blocks(branch, num_hit_tokens, hit_blocks, self._state.max_step_tokens)
        return missing + num_to_come <= kv_cache.num_free_blocks

    def _part_of(self, gap: int, step: StepDraft, branch: Branch) -> int:
        """The tokens of a gap that a step has room for."""
        return min(gap, step.room_for(branch), self._state.max_step_tokens)

    def _fit_media(self, step: StepDraft, branch: Branch, start: int, num_new_tokens: int, may_cut: bool = True) -> int:
        """How many of the next tokens can run, by the images that they read. One that is computed in one step may be
        more than its owner's part of the step."""
        if num_new_tokens <= 0:
            return 0
        most = min(step.budget, self._state.max_step_tokens)
        return self._state.media.fit(branch, start, num_new_tokens, most, may_cut=may_cut)

    def _may_split(self, gap: int) -> bool:
        """Whether a gap may be closed in parts: with chunked prefill off a prompt runs whole. A branch that grew beyond
        the budget and was then preempted can only resume in parts."""
        return self._state.config.enable_chunked_prefill or gap > self._state.config.token_budget

    def _build_plan(self, step: StepDraft) -> SchedulerOutput:
        """Turn the draft into a diff for the runner, and count the scheduled tokens as computed."""
        in_place = step.in_place
        known = CachedRequestData(
            [branch.branch_id for branch in in_place],
            [branch.num_computed_tokens for branch in in_place],
            [None] * len(in_place),
            [_tokens_behind_prompt(branch, 1) for branch in in_place] if self._writes_tokens else [],
        )
        plan = SchedulerOutput(
            self._state.next_step,
            scheduled_cached_reqs=known,
            num_scheduled_tokens=dict.fromkeys(known.req_ids, 1),
            total_num_scheduled_tokens=self._state.config.token_budget - step.budget,
            sampled_req_ids=known.req_ids.copy(),
            block_copies=self._state.kv_cache.take_block_copies(),
            finished_req_ids=self._state.finished_rows,
            preempted_req_ids=step.dropped_rows,
        )
        self._state.finished_rows = []
        for branch in in_place:
            branch.num_computed_tokens += 1
            if branch.num_to_draft and self._ask_for_drafts(plan, branch):
                continue
            if branch.plans_ahead and branch.num_tokens + branch.num_pending + 1 < branch.max_total_tokens:
                branch.num_pending += 1  # as in _expect_token
        for branch, num_new_tokens, appended in step.allocated:
            self._write_down(plan, branch, num_new_tokens, appended)
        if self._state.kv_cache.has_cross_group:
            self._write_encoder_steps(plan)
        for rows in step.rows:
            rows.write(plan)
        self.num_encoder_runs += len(plan.encoder_steps) + self._write_media(plan, step)
        if self._state.kv_cache.has_tier:
            plan.stores, plan.loads = self._state.kv_cache.store.take_transfers()
            plan.fetches, plan.saves = self._state.kv_cache.store.take_connector_transfers()
        plan.adapter_loads = self._state.adapters.take_loads()
        if self._state.adapters.awaits_load and not self._state.in_flight and plan.is_void:
            plan.awaits_adapters = True
        if self._state.kv_cache.store.arriving_blocks and not self._state.in_flight and plan.is_void:
            plan.awaits_loads = True
        self.num_scheduled_tokens = plan.total_num_scheduled_tokens
        if self._state.kv_cache.gives_blocks_back:
            self._state.note_given_back()
        if not plan.is_void:
            self.num_steps += 1
            self._state.next_step += 1
            self._state.in_flight.append(plan)
            num_read = sum(count for branch, count, _ in step.allocated if branch.request.task.reads_prompt)
            self._state.pace.planned(plan.step, self._state.now, num_read)
        return plan

    def _write_encoder_steps(self, plan: SchedulerOutput) -> None:
        for holder_id, table in self._state.kv_cache.take_encoder_writes():
            assert table.encoder_input is not None
            slot = self._state.branches[holder_id].request.adapter_slot
            step = EncoderStep(holder_id, table.encoder_input, table.block_ids, adapter_slot=slot)
            plan.encoder_steps.append(step)

    def _write_media(self, plan: SchedulerOutput, step: StepDraft) -> int:
        """Returns the number of images that the encoder runs over."""
        num_runs = self._state.media.write(plan)
        for branch in (*(branch for branch, _, _ in step.allocated), *(rows.branch for rows in step.rows)):
            if branch.media_end:
                self._state.media.settle(branch)
        return num_runs

    def _write_down(self, plan: SchedulerOutput, branch: Branch, num_new_tokens: int, appended: BlockIds) -> None:
        branch_id = branch.branch_id
        plan.num_scheduled_tokens[branch_id] = num_new_tokens
        if branch.known_to_runner:
            known = plan.scheduled_cached_reqs
            known.req_ids.append(branch_id)
            known.num_computed_tokens.append(branch.num_computed_tokens)
            known.new_block_ids.append(appended if any(appended) else None)
            if self._writes_tokens:
                known.new_token_ids.append(_tokens_behind_prompt(branch, num_new_tokens))
        else:
            plan.scheduled_new_reqs.append(branch.as_new_request(self._state.kv_cache.block_ids(branch)))
            branch.known_to_runner = True
        if branch.request.traced and (num_new_tokens > 1 or branch.num_computed_tokens < branch.num_prompt_tokens):
            self._state.events.chunk(branch, num_new_tokens, plan.step, self._state.now)
        branch.num_computed_tokens += num_new_tokens
        if branch.num_computed_tokens < branch.num_tokens:
            branch.write_limit = 0  # the end of a prompt must be handled here, because it may fork
        else:
            branch.request.task.complete(plan, branch_id)
            drafts_behind = branch.num_to_draft and self._ask_for_drafts(plan, branch)
            if branch.draft_tokens and self._write_drafts(plan, branch):
                return  # where it goes on is known with the result
            if drafts_behind:
                return  # and so are the drafts behind it
            if branch.plans_ahead and branch_id not in plan.fanout:  # choices are created with the result
                self._expect_token(branch)

    def _write_drafts(self, plan: SchedulerOutput, branch: Branch) -> bool:
        """Write down the drafts that there was room for; the others are dropped. False: there was none."""
        drafts, branch.draft_tokens = branch.draft_tokens, ()
        branch.num_drafts = max(0, branch.num_computed_tokens - branch.num_tokens - branch.num_pending)
        if branch.num_drafts:
            plan.scheduled_spec_decode_tokens[branch.branch_id] = list(drafts[: branch.num_drafts])
            if branch.drafts_of_device:
                plan.device_drafts.append(branch.branch_id)
        return branch.num_drafts > 0

    def _ask_for_drafts(self, plan: SchedulerOutput, branch: Branch) -> bool:
        """Let the device draft behind the token of this step, as far as the branch may get: it is not planned again
        before the drafts are there. False: the branch is about to end."""
        # Behind the token of this step and the last draft comes a token of its own.
        room = branch.max_total_tokens - branch.num_tokens - branch.num_pending - 2
        if room > 0:
            plan.draft_lengths[branch.branch_id] = min(branch.num_to_draft, room)
        return room > 0

    def _expect_token(self, branch: Branch) -> None:
        """A branch is sampled in this step, and may run in the next one before its token is known, unless it is the
        last."""
        if branch.num_tokens + branch.num_pending + 1 < branch.max_total_tokens:
            branch.num_pending += 1


def _tokens_behind_prompt(branch: Branch, count: int) -> list[int]:
    """Returns the next tokens of a branch that are known and that a worker has not got with the prompt."""
    start = branch.num_computed_tokens
    return branch.token_ids[max(start, branch.num_prompt_tokens) : start + count]


def _gap_of(branch: Branch) -> int:
    return branch.num_tokens + branch.num_pending - branch.num_computed_tokens
