"""The scheduler: which branches run in a step, with how many tokens; and what a step's results mean for them.

There are no phases. Every branch has a gap between its tokens and its computed tokens, and a step closes part of it
within a token budget. Knows no clock, no tensor and no text; the memory it hands out is counted by the KVCacheManager.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv import KVCacheConfig
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput, PromptLogprobsChunk
from ratoon.core.plan import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason, InheritedFrom
from ratoon.core.stats import SchedulerStats
from ratoon.memory.kv_cache_manager import GroupBlocks, KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.scheduling.admission import max_step_tokens, verify_request
from ratoon.scheduling.beam_group import BeamGroup
from ratoon.scheduling.beams import Hypothesis
from ratoon.scheduling.branch import Branch, BranchStatus, Request, branch_seed
from ratoon.scheduling.queues import queue_for, sort_key_for
from ratoon.scheduling.step_draft import StepDraft
from ratoon.scheduling.stopping import check_stop


class Admission(enum.Enum):
    """What came of the try to let a waiting branch in."""

    ADMITTED = enum.auto()
    NO_MEMORY = enum.auto()
    NOT_NOW = enum.auto()  # it does not fit into what is left of this step


class Scheduler:
    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_config: KVCacheConfig,
        max_model_len: int,
    ) -> None:
        self.config = scheduler_config
        self.max_model_len = max_model_len
        self.kv_cache = KVCacheManager(kv_config, max_model_len, cache_config.enable_prefix_caching)
        self.leases = LeaseTable(self.kv_cache, int(self.kv_cache.num_usable_blocks * cache_config.lease_fraction))
        self._now = 0.0
        self.requests: dict[str, Request] = {}
        self.running: list[Branch] = []
        self.waiting = queue_for(scheduler_config.policy)
        self._order = sort_key_for(scheduler_config.policy)
        self._max_step_tokens = max_step_tokens(scheduler_config)
        self._branches: dict[str, Branch] = {}  # unfinished ones
        self._reserved_ids: set[str] = set()  # branch ids of unfinished requests, those not forked yet included
        self._with_prompt_logprobs: set[str] = set()  # requests whose prompt rows wait for the first token
        self._finished_rows: list[str] = []  # for the next plan
        self._inherited: dict[str, InheritedFrom] = {}  # of continuations that have no token yet: said with their first
        self._searching: dict[str, BeamGroup] = {}  # unfinished beam searches by request id
        self._on_trial: dict[str, Request] = {}  # of a step that failed; each runs alone until it has got something
        self._num_added = 0
        self._num_preemptions = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0

    # ---- requests come and go ----

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError for one that could never be served, and for an id that is in use."""
        verify_request(request, self.config, self.kv_cache, self.max_model_len)
        state = Request(request, self.max_model_len, self._num_added)
        taken = [branch_id for branch_id in state.branch_ids if branch_id in self._reserved_ids]
        if taken:
            raise RequestError("request_id", f"{taken[0]!r} is in use", "an id that no unfinished request has")
        self._num_added += 1
        self._reserved_ids.update(state.branch_ids)
        self.requests[state.request_id] = state
        if state.beams is not None:
            self._searching[state.request_id] = state.beams
        for branch in state.branches:  # one, unless the request began elsewhere and is resumed
            if branch.status != BranchStatus.FINISHED:
                self._branches[branch.branch_id] = branch
                self.waiting.add(branch)
        if state.continuation_of is not None:
            self.leases.await_continuation(state.continuation_of, state.request_id)

    def abort_requests(self, ids: Iterable[str], keep: bool = False) -> list[EngineCoreOutput]:
        """End what callers no longer want: whole requests by their ids, one choice of several by `id#choice`. Ids that
        are unknown or finished are passed over. `keep`: a stop string ended them on the other side, and their memory
        is leased where that was asked for."""
        outputs = []
        for some_id in ids:
            request = self.requests.get(some_id)
            if request is not None:
                outputs += self._end_requests([request], FinishReason.ABORT, keep=keep)
            else:
                outputs += self._abort_choice(some_id, keep)
        return outputs

    def _abort_choice(self, choice_id: str, keep: bool) -> list[EngineCoreOutput]:
        request_id, _, number = choice_id.rpartition("#")
        request = self.requests.get(request_id)
        if request is None or len(request.branches) < request.num_choices:  # not forked: none has a token to stop at
            return []
        for branch in request.branches:
            if str(branch.choice) == number and branch.status != BranchStatus.FINISHED:
                self._release([branch], keep=keep)
                return [
                    EngineCoreOutput(
                        request_id, [], branch.choice, FinishReason.ABORT, num_cached_tokens=branch.num_cached_tokens
                    )
                ]
        return []

    def fail_requests(self, ids: Iterable[str], message: str) -> list[EngineCoreOutput]:
        """End requests, named by their ids or by those of their branches, with an error.

        For a step that raised: name every branch of its plan, before anything else is done with the scheduler. None of
        their blocks will be found in the prefix cache again, for nobody knows what the step has left in them.
        """
        return self._end_requests(self._find_requests(ids), FinishReason.ERROR, message)

    def try_apart(self, plan: SchedulerOutput) -> bool:
        """A step raised, and nobody knows whose fault it was. Its requests give their memory back, and each runs alone
        until it has got a token: the one at fault then fails alone, and the others go on. Nothing that the step may
        have spoilt is found again. False: there is only one request in it, so it is known whose fault it was.

        Call it before anything else is done with the scheduler, as with `fail_requests`.
        """
        requests = self._find_requests(plan.req_ids)
        if len(requests) == 1:
            return False
        for branch_id in plan.fanout:
            if branch_id in self._branches:
                self._branches[branch_id].request.forked = False  # its children were not made
        branches = [self._branches[branch_id] for branch_id in plan.req_ids if branch_id in self._branches]
        for branch in branches:
            if branch.known_to_runner:
                self._finished_rows.append(branch.branch_id)
            self._set_back(branch, trusted=False)
        self.running = [branch for branch in self.running if branch.status == BranchStatus.RUNNING]
        for branch in sorted(branches, key=self._order, reverse=True):
            self.waiting.prepend(branch)
        self._on_trial.update((request.request_id, request) for request in requests)
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        """Is there anything to plan: unfinished requests, or rows that the runner should drop?"""
        return bool(self.requests) or bool(self._finished_rows)

    def tick(self, now: float) -> None:
        """What time it is: leases count from here, and end."""
        self._now = now
        self.leases.expire(now)

    # ---- one step ----

    def schedule(self) -> SchedulerOutput:
        """Plan a step: running branches first, then waiting ones, then the plan."""
        step = StepDraft(self.config.max_num_batched_tokens)
        if self._on_trial:
            self._schedule_alone(step, next(iter(self._on_trial.values())))
            return self._build_plan(step)
        self._schedule_running(step)
        if not step.preempted:  # memory is short: whoever comes in now would be the next to go
            self._schedule_waiting(step)
        return self._build_plan(step)

    def _schedule_running(self, step: StepDraft) -> None:
        # This loop runs for every branch in every step. A decoding branch with room in its last block costs a few
        # attribute reads here; everything else is in _schedule_with_memory.
        take_in_place = step.in_place.append
        long_gaps: list[Branch] = []
        budget = step.budget
        for branch in self.running.copy():  # preemption changes the list
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
        for group in self._searching.values():
            self._schedule_beams(step, group)
        # Prompts take what single tokens leave, so that a long one does not silence everybody who came in after it.
        for branch in long_gaps:
            if step.budget > 0:
                self._schedule_with_memory(step, branch, branch.num_tokens - branch.num_computed_tokens)

    def _schedule_with_memory(self, step: StepDraft, branch: Branch, gap: int) -> None:
        """Give a running branch tokens and memory. If memory is short, the last in the order gives way, maybe itself.

        The first in the order thus always gets on, and since it fits into the pool alone, it ends.
        """
        if branch.status != BranchStatus.RUNNING:
            return  # it had to give way a moment ago
        num_new_tokens = gap if gap == 1 else min(gap, step.budget, self._max_step_tokens)
        while True:
            appended = self.kv_cache.allocate_slots(branch, num_new_tokens)
            if appended is not None:
                step.add(branch, num_new_tokens, appended)
                return
            if self.leases.evict_one():  # what has ended gives way before anybody who runs
                continue
            victim = max(self.running, key=self._order)
            self._preempt(step, victim)
            if victim is branch:
                return

    def _schedule_beams(self, step: StepDraft, group: BeamGroup) -> None:
        """The same for the beams of a search, which run all or none. The budget has room for them: they have their rows
        from the start, and there are no more rows than that while any search runs."""
        if group.trunk.status != BranchStatus.RUNNING or not group.is_ready(self.kv_cache):
            return
        at_once = min(step.budget, self._max_step_tokens) // group.num_beams
        num_new_tokens = min(group.gap, max(1, at_once))  # more than one where beams lost their memory
        while not group.allocate(num_new_tokens):
            if group.forget_kept() or self.leases.evict_one():
                continue
            victim = max(self.running, key=self._order)
            self._preempt(step, victim)
            if victim is group.trunk:
                return
        step.add_beams(group, num_new_tokens)

    def _preempt(self, step: StepDraft, branch: Branch) -> None:
        """Take a branch's memory. It will be computed again, as far as the prefix cache has not kept it."""
        step.remove(branch)
        step.preempted = True
        if branch.known_to_runner:
            step.dropped_rows.append(branch.branch_id)
        self.running.remove(branch)
        self._set_back(branch)
        self.waiting.prepend(branch)
        self._num_preemptions += 1

    def _schedule_waiting(self, step: StepDraft) -> None:
        while self.waiting and step.budget > 0 and self._has_rows_for(self.waiting.peek()):
            if not self._admit(step, self.waiting.peek()):
                break  # nobody overtakes the first in the queue
            self.waiting.pop()

    def _has_rows_for(self, branch: Branch) -> bool:
        """Is there a row for it, or for each of its beams? While a search runs, there are no more rows than tokens in a
        step, so that all its beams always find room in one."""
        num_rows, limit = len(self.running) + branch.num_rows, self.config.max_num_seqs
        if self._searching:
            num_rows += sum(
                group.width - 1 for group in self._searching.values() if group.trunk.status == BranchStatus.RUNNING
            )
            limit = min(limit, self.config.max_num_batched_tokens)
        return num_rows <= limit

    def _schedule_alone(self, step: StepDraft, request: Request) -> None:
        """One request, whatever its place in the order. If memory or rows are short, others give way."""
        for branch in request.branches:
            if step.budget <= 0:
                return
            if branch.status == BranchStatus.RUNNING:
                gap = branch.num_tokens - branch.num_computed_tokens
                if gap:
                    self._schedule_with_memory(step, branch, gap)
                elif request.beams is not None:
                    self._schedule_beams(step, request.beams)
            elif branch.status != BranchStatus.FINISHED:
                while not self._has_rows_for(branch) or not self._admit(step, branch):
                    others = [other for other in self.running if other.request is not request]
                    if not others:
                        return
                    self._preempt(step, max(others, key=self._order))
                self.waiting.remove({branch})

    def _admit(self, step: StepDraft, branch: Branch) -> bool:
        """Let a branch in, if it fits. Leases give way to it, where that is enough."""
        while True:
            admission = self._try_to_admit(step, branch)
            if admission != Admission.NO_MEMORY:
                return admission == Admission.ADMITTED
            num_wanted = self.kv_cache.required_blocks(min(branch.num_tokens, self._max_step_tokens))
            if branch.request.beams is not None:
                num_wanted += branch.request.beams.num_blocks_to_come(self.kv_cache)
            if self.kv_cache.num_free_blocks + self.leases.num_reclaimable_blocks() < num_wanted:
                return False
            if not self.leases.evict_one():
                return False

    def _try_to_admit(self, step: StepDraft, branch: Branch) -> Admission:
        hit_blocks: GroupBlocks | None = None
        num_inherited = num_hit_tokens = self._inherit(branch)
        if not num_inherited:
            hit_blocks, num_hit_tokens = self._find_computed_prefix(branch)
        gap = branch.num_tokens - num_hit_tokens
        num_new_tokens = min(gap, step.budget, self._max_step_tokens)
        fits_step = num_new_tokens == gap or self._may_split(gap)
        appended = None
        if fits_step and self._has_memory_for_beams(branch, num_hit_tokens, hit_blocks):
            num_found_tokens = num_hit_tokens - num_inherited  # what is inherited is in its tables already
            appended = self.kv_cache.allocate_slots(branch, num_new_tokens, hit_blocks, num_found_tokens)
        if appended is None:
            if num_inherited:
                self.kv_cache.free(branch)
            return Admission.NO_MEMORY if fits_step else Admission.NOT_NOW
        self.running.append(branch)
        if branch.status == BranchStatus.WAITING:  # its first time; what a resumed branch finds is its own work
            branch.num_cached_tokens = num_hit_tokens
            if hit_blocks is not None:
                self.kv_cache.count_lookup(branch.num_tokens, num_hit_tokens)
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
        missing = self.kv_cache.missing_blocks(branch.num_tokens, num_hit_tokens, hit_blocks, self._max_step_tokens)
        return missing + beams.num_blocks_to_come(self.kv_cache) <= self.kv_cache.num_free_blocks

    def _inherit(self, branch: Branch) -> int:
        """Give a continuation its parent's memory, where that is kept or still runs. How many tokens it has then."""
        request = branch.request
        if request.continuation_of is None or branch.choice != 0 or request.needs_every_prompt_row:
            return 0
        parent = self.leases.find(request.continuation_of) or self._branches.get(request.continuation_of)
        if parent is None:
            return 0
        return self.kv_cache.inherit_blocks_from_parent(parent, branch, request.num_inheritable_tokens)

    def _note_inheritance(self, branch: Branch, num_inherited: int) -> None:
        request = branch.request
        if request.continuation_of is None:
            return
        self.leases.continuation_left(request.continuation_of, request.request_id)
        if num_inherited:
            self.leases.stats.continued += 1
            source = InheritedFrom.LEASE
        else:
            source = InheritedFrom.PREFIX_CACHE if branch.num_cached_tokens else InheritedFrom.RECOMPUTED
        self._inherited[request.request_id] = source

    def _find_computed_prefix(self, branch: Branch) -> tuple[GroupBlocks | None, int]:
        # Log-probabilities of the prompt and means over it need every prompt row computed: there is nothing to look up.
        if branch.choice == 0 and branch.request.needs_every_prompt_row:
            return None, 0
        return self.kv_cache.get_computed_blocks(branch)

    def _may_split(self, gap: int) -> bool:
        """With chunked prefill off a prompt runs whole. A branch that grew beyond the budget and was then preempted has
        no other way back in than in parts."""
        return self.config.enable_chunked_prefill or gap > self.config.max_num_batched_tokens

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
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.budget,
            sampled_req_ids=known.req_ids.copy(),
            block_copies=self.kv_cache.take_block_copies(),
            finished_req_ids=self._finished_rows,
            preempted_req_ids=step.dropped_rows,
        )
        self._finished_rows = []
        for branch in in_place:
            branch.num_computed_tokens += 1
        for branch, num_new_tokens, appended in step.allocated:
            self._write_down(plan, branch, num_new_tokens, appended)
        plan.beam_steps += [group.take_step(num_new_tokens) for group, num_new_tokens in step.beams]
        self._num_steps += 1
        self._num_scheduled_tokens = plan.total_num_scheduled_tokens
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
            block_ids=self.kv_cache.block_ids(branch),
            num_computed_tokens=branch.num_computed_tokens,
            pooling_params=branch.request.pooling_params,
        )

    # ---- what a step brought ----

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the results of a plan: append tokens, end what is done, and say what is new for every choice.

        Results for branches that ended while the step ran are dropped.
        """
        children = self._fork_children(plan) if plan.fanout else []
        inherited = self._inherited.copy()  # a request may end, and be forgotten, with its first token
        outputs: list[EngineCoreOutput] = []
        for branch_id, message in output.errors.items():
            outputs += self.fail_requests([branch_id], message)
        for branch_id, chunk in output.prompt_logprobs.items():
            self._keep_prompt_logprobs(branch_id, chunk)
        self._take_tokens(output, outputs)
        if plan.pooled_req_ids:
            outputs += self._take_vectors(plan, output)
        if plan.beam_steps:
            outputs += self._take_candidates(plan, output)
        if children:
            self._place_children(children)
        outputs += self._fail_unanswered(plan, output)
        if self._on_trial or inherited:
            for answer in outputs:
                if answer.new_token_ids:
                    self._on_trial.pop(answer.request_id, None)
                    answer.inherited_from = inherited.pop(answer.request_id, None)
                    self._inherited.pop(answer.request_id, None)
        return outputs

    def _take_tokens(self, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        # The other loop that runs for every branch in every step.
        find_branch = self._branches.get
        give = outputs.append
        all_logprobs, with_prompt_logprobs = output.logprobs, self._with_prompt_logprobs
        finished: list[Branch] = []
        for branch_id, token_ids in zip(output.req_ids, output.sampled_token_ids):
            branch = find_branch(branch_id)
            if branch is None:
                continue
            num_tokens = branch.num_tokens
            if branch.num_computed_tokens != num_tokens:
                continue  # a result from before it was aborted and its id used again
            finish_reason = stop_reason = None
            logprobs = all_logprobs.get(branch_id) if all_logprobs else None
            if (
                len(token_ids) == 1
                and token_ids[0] not in branch.stop_token_ids
                and num_tokens + 1 < branch.max_total_tokens
            ):
                branch.token_ids.append(token_ids[0])
                branch.num_tokens = num_tokens + 1
            elif token_ids:
                count, finish_reason, stop_reason = check_stop(branch, token_ids)
                token_ids = token_ids[:count]
                logprobs = _first_rows(logprobs, count)
                branch.append_tokens(token_ids)
                if finish_reason is not None:
                    finished.append(branch)
            else:
                continue
            prompt_logprobs = self._take_prompt_logprobs(branch) if with_prompt_logprobs else None
            give(
                EngineCoreOutput(
                    branch.request_id,
                    token_ids,
                    branch.choice,
                    finish_reason,
                    stop_reason,
                    logprobs,
                    prompt_logprobs,
                    branch.num_cached_tokens,
                )
            )
        if finished:
            self._release(finished, keep=True)

    def _take_vectors(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """A pooling branch ends with its vector. One that should have got it and did not would wait for it forever."""
        outputs: list[EngineCoreOutput] = []
        finished: list[Branch] = []
        missing: list[str] = []
        for branch_id in plan.pooled_req_ids:
            branch = self._branches.get(branch_id)
            if branch is None or branch.num_computed_tokens != branch.num_tokens:
                continue  # it failed or was aborted; its id may be in use again
            vector = output.pooled.get(branch_id)
            if vector is None:
                missing.append(branch_id)
                continue
            finished.append(branch)
            outputs.append(
                EngineCoreOutput(
                    branch.request_id,
                    [],
                    finish_reason=FinishReason.STOP,
                    num_cached_tokens=branch.num_cached_tokens,
                    pooled=vector,
                )
            )
        self._release(finished)
        return outputs + self.fail_requests(missing, "the runner returned no vector")

    def _take_candidates(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Let searches go on. One that should have got candidates and did not would wait for them forever."""
        outputs: list[EngineCoreOutput] = []
        for beam_step in plan.beam_steps:
            group = self._searching.get(beam_step.req_id)
            if group is None or not beam_step.num_candidates or not group.awaits(beam_step):
                continue
            candidates = output.candidates.get(beam_step.req_id)
            if candidates is None:
                outputs += self.fail_requests([beam_step.req_id], "the runner returned no candidates")
                continue
            self._on_trial.pop(beam_step.req_id, None)
            group.advance(self.kv_cache, candidates)
            if group.search.done:
                outputs += self._end_search(group)
            elif group.wants_snapshots:
                outputs += self._snapshot(group)
        return outputs

    def _snapshot(self, group: BeamGroup) -> list[EngineCoreOutput]:
        """The best text so far."""
        best = group.search.best_so_far()
        return [] if best is None else [_text_output(group, 0, best._replace(finish_reason=None))]

    def _end_search(self, group: BeamGroup) -> list[EngineCoreOutput]:
        request = group.trunk.request
        texts = group.search.hypotheses()
        if len(texts) < request.num_choices:
            problem = f"there are only {len(texts)} texts to find, and {request.num_choices} are wanted"
            return self.fail_requests([request.request_id], problem)
        if request.retain_kv is not None:
            for sequence in group.kept_sequences(request.branch_ids):
                if not self.leases.grant(sequence, self._now + request.retain_kv):
                    self.kv_cache.free(sequence)
        request.finished_choices.update(range(request.num_choices))
        self._release([group.trunk])
        return [_text_output(group, choice, text) for choice, text in enumerate(texts)]

    def _fork_children(self, plan: SchedulerOutput) -> list[Branch]:
        """The other choices of prompts that this step has completed, each on the memory of the first."""
        children = []
        for root_id in plan.fanout:
            root = self._branches.get(root_id)
            if root is None or root.num_computed_tokens != root.num_tokens:
                continue
            request = root.request
            for choice in range(1, request.num_choices):
                child = request.fork_branch(choice)
                self.kv_cache.fork(root, child, request.num_prompt_tokens)
                self._branches[child.branch_id] = child
                children.append(child)
        return children

    def _place_children(self, children: list[Branch]) -> None:
        """New choices run at once while there are rows for them. The rest give their memory back and queue in front:
        waiting branches hold no blocks, so they can't keep anyone from ending. The prefix cache has their prompt."""
        queued = []
        for child in children:
            if child.status == BranchStatus.FINISHED:
                continue
            if self._has_rows_for(child):
                child.status = BranchStatus.RUNNING
                self.running.append(child)
            else:
                self._set_back(child)
                queued.append(child)
        for child in reversed(queued):
            self.waiting.prepend(child)

    def _set_back(self, branch: Branch, trusted: bool = True) -> None:
        if branch.request.beams is not None:
            branch.request.beams.set_back()
        self.kv_cache.free(branch, trusted)
        branch.known_to_runner = False
        branch.status = BranchStatus.PREEMPTED

    def _fail_unanswered(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """A branch that should have got a token and did not would wait for it forever: say so instead."""
        num_expected = len(plan.sampled_req_ids) + sum(map(len, plan.fanout.values()))
        if len(output.req_ids) >= num_expected and all(output.sampled_token_ids):
            return []
        answered = {req_id for req_id, token_ids in zip(output.req_ids, output.sampled_token_ids) if token_ids}
        expected = plan.sampled_req_ids + [child_id for children in plan.fanout.values() for child_id, _ in children]
        missing = [req_id for req_id in expected if req_id not in answered]
        return self.fail_requests(missing, "the runner returned no token")

    # ---- prompt log-probabilities ----

    def _keep_prompt_logprobs(self, branch_id: str, chunk: PromptLogprobsChunk) -> None:
        """Keep the rows that are new. A prompt that was preempted computes (and sends) its first rows once more."""
        branch = self._branches.get(branch_id)
        if branch is None or branch.choice != 0:
            return
        request = branch.request
        end = chunk.start + len(chunk.rows.token_ids)
        num_had = max(0, request.next_prompt_logprob - chunk.start)
        if chunk.start + num_had >= end:
            return
        rows = chunk.rows
        if num_had:
            rows = LogprobsLists(rows.token_ids[num_had:], rows.logprobs[num_had:], rows.sampled_ranks[num_had:])
        request.prompt_logprobs.append(PromptLogprobsChunk(chunk.start + num_had, rows))
        request.next_prompt_logprob = end
        self._with_prompt_logprobs.add(request.request_id)

    def _take_prompt_logprobs(self, branch: Branch) -> list[PromptLogprobsChunk] | None:
        if branch.choice != 0 or branch.request_id not in self._with_prompt_logprobs:
            return None
        self._with_prompt_logprobs.remove(branch.request_id)
        chunks, branch.request.prompt_logprobs = branch.request.prompt_logprobs, []
        return chunks

    # ---- endings ----

    def _find_requests(self, ids: Iterable[str]) -> list[Request]:
        """Unfinished requests by their ids or their branches' ids, each once."""
        found: dict[str, Request] = {}
        for some_id in ids:
            branch = self._branches.get(some_id)
            request = branch.request if branch is not None else self.requests.get(some_id)
            if request is not None:
                found[request.request_id] = request
        return list(found.values())

    def _end_requests(
        self, requests: list[Request], reason: FinishReason, error: str | None = None, keep: bool = False
    ) -> list[EngineCoreOutput]:
        """End all choices that are not finished, those included that were never forked."""
        outputs = []
        branches = []
        for request in requests:
            branches += [branch for branch in request.branches if branch.status != BranchStatus.FINISHED]
            for choice in range(request.num_choices):
                if choice not in request.finished_choices:
                    request.finished_choices.add(choice)
                    num_cached_tokens = request.branches[0].num_cached_tokens
                    outputs.append(
                        EngineCoreOutput(
                            request.request_id, [], choice, reason, num_cached_tokens=num_cached_tokens, error=error
                        )
                    )
        self._release(branches, trusted=reason != FinishReason.ERROR, keep=keep)
        for request in requests:
            self._forget(request)
        return outputs

    def _release(self, branches: list[Branch], trusted: bool = True, keep: bool = False) -> None:
        """Take ended branches out of everything, and give their memory back, or lease it where that was asked for."""
        waiting = {branch for branch in branches if branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED)}
        for branch in branches:
            if branch.request.beams is not None:
                branch.request.beams.set_back()
            retain_kv = branch.request.retain_kv if keep and branch.request.beams is None else None
            if retain_kv is None or not self.leases.grant(branch, self._now + retain_kv):
                self.kv_cache.free(branch, trusted)
            branch.status = BranchStatus.FINISHED
            if branch.known_to_runner:
                self._finished_rows.append(branch.branch_id)
            del self._branches[branch.branch_id]
            request = branch.request
            request.finished_choices.add(branch.choice)
            if len(request.finished_choices) == request.num_choices:
                self._forget(request)
        if len(waiting) < len(branches):
            self.running = [branch for branch in self.running if branch.status != BranchStatus.FINISHED]
        if waiting:
            self.waiting.remove(waiting)

    def _forget(self, request: Request) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            self._reserved_ids.difference_update(request.branch_ids)
            self._with_prompt_logprobs.discard(request.request_id)
            self._on_trial.pop(request.request_id, None)
            self._searching.pop(request.request_id, None)
            self._inherited.pop(request.request_id, None)
            if request.continuation_of is not None:
                self.leases.continuation_left(request.continuation_of, request.request_id)

    # ---- figures and checks ----

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, and end all leases. Refused (False) while any request is under way."""
        if self.requests:
            return False
        self.leases.end_all()
        return self.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_usage=self.kv_cache.usage,
            num_preemptions=self._num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_steps=self._num_steps,
            prefix_cache=msgspec.structs.replace(self.kv_cache.prefix_cache_stats),
            leases=self.leases.snapshot(),
        )

    def check(self) -> None:
        """Raise AssertionError unless queues, branches and memory agree with each other. Slow: for tests."""
        beams = [held for group in self._searching.values() for held in group.held()]
        self.kv_cache.check([*self._branches.values(), *self.leases.sequences(), *beams])
        self.leases.check()
        running, waiting = set(self.running), set(self.waiting)
        assert len(running) == len(self.running) and len(waiting) == len(self.waiting), "a branch is queued twice"
        assert self._on_trial.keys() <= self.requests.keys(), "somebody is on trial who is gone"
        assert running | waiting == set(self._branches.values()), (
            "the queues do not hold exactly the unfinished branches"
        )
        num_rows = sum(branch.num_rows for branch in running)
        assert num_rows <= self.config.max_num_seqs, f"{num_rows} branches run, {self.config.max_num_seqs} may"
        for branch in running:
            assert branch.status == BranchStatus.RUNNING, f"{branch.branch_id} runs with status {branch.status!r}"
        for branch in waiting:
            assert branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED), (
                f"{branch.branch_id}: {branch.status!r}"
            )
            assert not any(branch.block_tables), f"{branch.branch_id} waits and holds blocks"
            assert branch.num_computed_tokens == 0, f"{branch.branch_id} waits with computed tokens"
        for branch in self._branches.values():
            assert branch.num_tokens == len(branch.token_ids), f"{branch.branch_id}: miscounted tokens"
            assert branch.num_computed_tokens <= branch.num_tokens, f"{branch.branch_id}: more computed than there is"
            assert branch.num_tokens <= branch.max_total_tokens, f"{branch.branch_id} is longer than it may be"
            assert self.requests.get(branch.request_id) is branch.request, f"{branch.branch_id} has no request"


def _text_output(group: BeamGroup, choice: int, text: Hypothesis) -> EngineCoreOutput:
    return EngineCoreOutput(
        group.trunk.request_id,
        text.token_ids,
        choice,
        text.finish_reason,
        text.token_ids[-1] if text.finish_reason == FinishReason.STOP else None,
        num_cached_tokens=group.trunk.num_cached_tokens,
        score=text.score,
        cumulative_logprob=text.cumulative_logprob,
        replaces=True,
    )


def _first_rows(rows: LogprobsLists | None, count: int) -> LogprobsLists | None:
    if rows is None:
        return None
    return LogprobsLists(rows.token_ids[:count], rows.logprobs[:count], rows.sampled_ranks[:count])
