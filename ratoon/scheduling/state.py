"""The scheduler's state: requests and their branches, their queues, their memory, and how they end.

planner.py decides what runs in a step, results.py applies its results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ratoon.core.adapters import AdapterReport
from ratoon.core.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from ratoon.core.errors import RequestError
from ratoon.core.faults import fault_of
from ratoon.core.kv import SwapCosts
from ratoon.core.messages import Fault
from ratoon.core.outputs import TransferReport
from ratoon.core.plan import SchedulerOutput
from ratoon.core.readings import reading_id
from ratoon.core.request import EngineCoreOutput, FinishReason, InheritedFrom
from ratoon.core.speculation import SpeculationConfig
from ratoon.memory.block_pool import Block
from ratoon.memory.encoder_cache import EncoderCache
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.memory.sequence import TokenSequence
from ratoon.scheduling.adapter_gate import AdapterGate
from ratoon.scheduling.admission import max_step_tokens
from ratoon.scheduling.branch import NEVER, Branch, BranchStatus, Request
from ratoon.scheduling.drafters.build import build_drafters
from ratoon.scheduling.events import EventLog
from ratoon.scheduling.loading import LoadingBranches
from ratoon.scheduling.media_inputs import MediaInputs
from ratoon.scheduling.pace import StepPace
from ratoon.scheduling.prefix_reads import PrefixReads
from ratoon.scheduling.queues import FairQueue, sort_key_for
from ratoon.scheduling.shares import Owner, OwnerShares, held_by_owners, last_of_largest, rows_of, tokens_of
from ratoon.scheduling.speculation import Speculation

MAX_STEPS_OF_REST = 32  # that a branch is left out for, while what its grammar allows is not known


class SchedulerState:
    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        leases: LeaseTable,
        swap_costs: SwapCosts | None = None,  # None: preempted branches are swapped out wherever there is room
        speculation: SpeculationConfig | None = None,
        num_adapter_slots: int = 0,
        draft_cost: float = 0.0,
        encoder_cache_size: int = CacheConfig().encoder_cache_size,
    ) -> None:
        self.config = config
        self.swap_costs = swap_costs
        self.max_step_tokens = max_step_tokens(config)
        self.kv_cache = kv_cache
        self.leases = leases
        self.readings = PrefixReads(kv_cache)
        self.loads = LoadingBranches(kv_cache)
        self.media = MediaInputs(EncoderCache(encoder_cache_size), config.max_num_encoder_tokens)
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.branches: dict[str, Branch] = {}  # unfinished ones
        self.running: list[Branch] = []
        self.shares = OwnerShares()
        self.pace = StepPace()
        asked = speculation or SpeculationConfig()
        self.speculation = Speculation(asked, build_drafters(asked), self.pace, config.max_num_seqs, draft_cost)
        self.waiting = FairQueue(config.policy, self.shares)
        self.order = sort_key_for(config.policy)
        self.adapters = AdapterGate(num_adapter_slots, self.waiting.turn)
        # Unfinished branches with several rows that run all or none: one token of each in every step
        self.all_or_none: dict[str, Branch] = {}
        # Branches whose last token is computed, and will be again in this step: what their grammar allows next is not
        # known yet
        self.resting: dict[Branch, int] = {}
        self.quarantined: dict[str, Request] = {}  # of a failed step; each runs alone until it gets a result
        self.inherited: dict[str, InheritedFrom] = {}  # of continuations without a token yet: sent with the first
        self.finished_rows: list[str] = []  # for the next plan
        self.events = EventLog()
        self.in_flight: list[SchedulerOutput] = []  # plans whose results are not known, the oldest first
        self.next_step = 1  # number of the next plan
        # A plan left out a branch for which others must be preempted, once no step is in flight.
        self.wants_drain = False
        # Blocks freed by branches in flight (ended, or before a sliding window), with the number of the last step that
        # may access them
        self.left_in_flight: list[tuple[int, list[Block]]] = []
        self._reserved_ids: set[str] = set()  # branch ids of unfinished requests, including those not forked yet

    def verify_ids(self, request: Request) -> None:
        """Raise RequestError for an id that is in use."""
        names = request.branch_ids.copy()
        if request.original is not None:
            names += map(reading_id, request.branch_ids)
        taken = [name for name in names if name in self._reserved_ids]
        if taken:
            raise RequestError("request_id", f"{taken[0]!r} is in use", "an id that no unfinished request has")

    def add(self, request: Request) -> None:
        """A request that its kind has queued."""
        self._reserved_ids.update(request.branch_ids)
        request.queued_time = request.added_time = self.now
        self.requests[request.request_id] = request
        self.shares.join(request.owner)
        for branch in request.branches:
            if branch.status != BranchStatus.FINISHED:
                self.branches[branch.branch_id] = branch
        if request.continuation_of is not None:
            self.leases.await_continuation(request.continuation_of, request.request_id)

    def rest(self, branch: Branch) -> None:
        """Leave a branch out of the next plans, for twice as many as the last time if it got no token since."""
        num_tokens, num_steps = branch.rest
        num_steps = min(2 * num_steps, MAX_STEPS_OF_REST) if num_tokens == branch.num_tokens else 1
        branch.rest = branch.num_tokens, num_steps
        self.resting[branch] = self.next_step + num_steps

    def end_rests(self, *, early: bool = False) -> None:
        """Ends the rests of the branches whose step has come, or of all."""
        for branch in [branch for branch, step in self.resting.items() if early or step <= self.next_step]:
            self.end_rest(branch)

    def end_rest(self, branch: Branch) -> None:
        if self.resting.pop(branch, None) is not None:
            self.kv_cache.take_back(branch)

    @property
    def may_take_memory(self) -> bool:
        """Whether branches may be preempted. Not while steps are in flight: their results may make it unnecessary, and
        belong to running branches."""
        return not self.in_flight

    def discard_in_flight(self, branch: Branch) -> bool:
        """A branch ends: discard what steps in flight compute and sample for it. False: its first step is among them,
        so the content of its blocks is not certain."""
        flying = [plan for plan in self.in_flight if plan.step >= branch.first_step]
        if flying:
            held = [block for table in branch.block_tables for block in table]
            if branch.cross is not None:
                held += branch.cross.blocks
            self.left_in_flight.append((flying[-1].step, held))
        num_tokens = sum(branch.request.task.num_written_tokens(plan, branch.branch_id) for plan in flying)
        num_unknown = branch.num_computed_tokens - branch.num_tokens  # drafts of a step that is done are among them
        if max(num_tokens, num_unknown) > 0 or branch.speculates:  # drafts may leave blocks behind its last token
            self.kv_cache.roll_back(branch, max(num_tokens, num_unknown, 0))
        branch.num_pending = branch.num_drafts = 0
        return not flying or flying[0].step > branch.first_step

    def note_given_back(self) -> None:
        """A plan was made: blocks that branches freed for it may still be accessed by earlier steps in flight."""
        blocks = self.kv_cache.take_given_back()
        if blocks and self.in_flight:
            self.left_in_flight.append((self.in_flight[-1].step, blocks))

    def step_done(self, plan: SchedulerOutput, has_prepared: bool = False) -> None:
        """A step was executed. `has_prepared`: it took longer than later ones of its size will."""
        step = plan.step
        if not plan.encoder_steps and not plan.scheduled_encoder_inputs:  # their cost is not in the number of tokens
            self.pace.done(step, 0 if has_prepared else plan.total_num_scheduled_tokens, self.now)
        self.in_flight = [plan for plan in self.in_flight if plan.step > step]
        if self.left_in_flight:
            self.left_in_flight = [left for left in self.left_in_flight if left[0] > step]
        self.adapters.step_done(step)
        self.events.step_done(step, self.now)

    def take_adapters(self, report: AdapterReport) -> list[EngineCoreOutput]:
        """Adapters were loaded, or could not be: requests that waited for them are queued, or fail."""
        return self._refuse_each(self.adapters.take_report(report, self.now)) + self.admit_with_adapters()

    def admit_with_adapters(self) -> list[EngineCoreOutput]:
        """Queues requests whose adapters are there by now."""
        return self._refuse_each(self.adapters.let_through()) if self.adapters else []

    def _refuse_each(self, refused: list[tuple[Request, RequestError]]) -> list[EngineCoreOutput]:
        return [
            output
            for request, error in refused
            for output in self.refuse_requests([request.request_id], fault_of(error))
        ]

    def take_transfers(self, report: TransferReport) -> None:
        """Blocks were loaded or stored: branches that waited for them go back to the front of the queue."""
        self._put_in_front(self.loads.arrived(self.kv_cache.take_report(report)))

    def _put_in_front(self, branches: list[Branch]) -> None:
        for branch in sorted(branches, key=self.order, reverse=True):
            self.waiting.prepend(branch)

    def steps_failed(self) -> list[SchedulerOutput]:
        """The oldest step in flight failed, and later ones were skipped: they are returned. Blocks that they should
        have written leave the prefix cache; dropped rows are sent again with the next plan. Their loads have failed."""
        failed, self.in_flight = self.in_flight, []
        self.pace.skipped()
        left, self.left_in_flight = self.left_in_flight, []
        self.events.step_done(failed[-1].step, self.now)
        for plan in failed:
            self.finished_rows += plan.finished_req_ids + plan.preempted_req_ids
            self.kv_cache.invalidate_writes(plan)
            self.media.cache.plan_failed(plan.scheduled_encoder_inputs, plan.free_encoder_mm_hashes)
        for _, blocks in left:
            self.kv_cache.uncache(blocks)
        self.kv_cache.store.fail_loads()
        self._put_in_front(self.loads.fail())
        return failed

    def loads_of_adapters_failed(self, failed: list[SchedulerOutput], message: str) -> list[EngineCoreOutput]:
        """Steps failed that may have told workers of adapters, or been told: the next plan tells of them again. If the
        first did nothing but load adapters, these are the cause, and requests that wait for them fail."""
        self.adapters.step_done(failed[-1].step)
        first, outputs = failed[0], []
        if first.is_empty and first.adapter_loads:
            outputs = self.take_adapters(AdapterReport(failed={load.slot: message for load in first.adapter_loads}))
        self.adapters.send_again()
        return outputs

    def has_rows_for(self, branch: Branch) -> bool:
        """Whether there are enough free rows. While searches run, rows are limited to the token budget, so that all of
        them fit in one step."""
        num_rows, limit = self.num_running_rows + self.loads.num_rows + branch.num_rows, self.config.max_num_seqs
        if self.all_or_none:
            limit = min(limit, self.config.token_budget)
        return num_rows <= limit

    @property
    def num_running_rows(self) -> int:
        """Rows of running branches: one of each, and one of each beam of a search."""
        trunks = self.all_or_none.values()
        return len(self.running) + sum(trunk.num_rows - 1 for trunk in trunks if trunk.status == BranchStatus.RUNNING)

    def spared_owners(self, branch: Branch) -> Collection[Owner]:
        """Owners whose leases are not evicted for this branch: those within their share of the leases, if this branch
        would take its owner beyond its share of the pool. One branch of each owner always makes progress."""
        owner = branch.request.owner
        if not self.leases.owners() - {owner} or self.quarantined:
            return ()
        own = {branch, *(other for other in self.running if other.request.owner == owner)}
        num_owners = len(self.leases.owners() | {request.owner for request in self.requests.values()})
        if len(own) <= 1 or sum(map(tokens_of, own)) <= self.kv_cache.num_usable_tokens // num_owners:
            return ()
        return self.leases.owners_within_share() - {owner}

    def last_of_largest_owner(self, branches: list[Branch]) -> Branch | None:
        """Returns, of the least important branches, the last of the owner that holds most memory. None: each owner has
        only one."""
        worst = max(map(self._importance, branches))
        return last_of_largest(branches, tokens_of, self.order, lambda branch: self._importance(branch) == worst)

    def find_one_beyond_its_share(self, waiting: Branch, among: list[Branch]) -> Branch | None:
        """The running branch to preempt for a waiting one whose owner runs less than its share. None: no owner runs
        more than its share."""
        if not self.shares.contended:
            return None
        if self.has_rows_for(waiting):
            size, capacity = tokens_of, self.kv_cache.num_usable_tokens
        else:
            size, capacity = rows_of, self.config.max_num_seqs
        share = max(1, capacity // self.shares.num_owners)
        if held_by_owners(self.running, size)[waiting.request.owner] + size(waiting) > share:
            return None
        importance = self._importance(waiting)
        return last_of_largest(
            among, size, self.order, lambda branch: self._importance(branch) >= importance, above=share
        )

    def _importance(self, branch: Branch) -> int:
        """Lower is more important. With FCFS all are equal."""
        return branch.request.priority if self.config.policy == SchedulingPolicy.PRIORITY else 0

    def find_requests(self, ids: Iterable[str]) -> list[Request]:
        """Unfinished requests by their ids or their branches' ids, each once."""
        found: dict[str, Request] = {}
        for some_id in ids:
            branch = self.branches.get(some_id)
            request = branch.request if branch is not None else self.requests.get(some_id)
            if request is not None:
                found[request.request_id] = request
        return list(found.values())

    def fail_requests(self, ids: Iterable[str], message: str) -> list[EngineCoreOutput]:
        """End requests, named by their ids or by those of their branches, with an error. Their blocks leave the prefix
        cache."""
        return self.end_requests(self.find_requests(ids), FinishReason.ERROR, message)

    def refuse_requests(self, ids: Iterable[str], refusal: Fault) -> list[EngineCoreOutput]:
        """Ends requests with a refusal: they are at fault themselves, so that what they computed stays in the prefix
        cache."""
        error = f"{refusal.subject}: {refusal.problem}; expected {refusal.expected}"
        requests = self.find_requests(ids)
        return self.end_requests(requests, FinishReason.ERROR, error, trusted=True, refusal=refusal)

    def end_requests(
        self,
        requests: list[Request],
        reason: FinishReason,
        error: str | None = None,
        *,
        trusted: bool | None = None,  # default: if no error occurred
        refusal: Fault | None = None,
    ) -> list[EngineCoreOutput]:
        """End all unfinished choices, including those never forked."""
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
                            request.request_id,
                            [],
                            choice,
                            reason,
                            num_cached_tokens=num_cached_tokens,
                            error=error,
                            refusal=refusal,
                        )
                    )
        if self.events:
            self.events.tell(outputs)
        self.release(branches, trusted=reason != FinishReason.ERROR if trusted is None else trusted)
        for request in requests:
            self._forget(request)
        return outputs

    def reclaim(self, branch: Branch, trusted: bool = True, may_swap: bool = False) -> None:
        """Preempt a branch and take its memory: it is swapped out if `may_swap`, there is room and computing it again
        would take longer; otherwise it is computed again."""
        self.end_rest(branch)
        if branch.media_end:
            self.media.cache.release(branch, trusted=trusted)
        if not (may_swap and self._swap_out(branch)):
            branch.request.task.reclaim()
            self.kv_cache.free(branch, trusted)
        branch.known_to_runner = False
        branch.status = BranchStatus.PREEMPTED
        branch.num_pending = branch.num_drafts = 0
        branch.draft_tokens, branch.waits_to_draft = (), False
        branch.first_step = NEVER

    def _swap_out(self, branch: Branch) -> bool:
        task = branch.request.task
        if not self.kv_cache.has_tier or not task.can_be_swapped or not self._is_worth_swapping(branch):
            return False
        if task.swap_out():
            return True
        task.reclaim()
        num_computed_tokens = branch.num_computed_tokens
        # A resumed branch must have a token to run. For a trunk swapped out without its beams that is the prompt's last
        # token; the beams' tokens are computed again.
        num_kept = branch.extra_keys.before_part(min(num_computed_tokens, branch.num_tokens - 1))
        if not self.kv_cache.holds(branch, num_kept):
            return False
        branch.num_computed_tokens = num_kept
        if self.kv_cache.swap_out(branch):
            return True
        branch.num_computed_tokens = num_computed_tokens
        return False

    def _is_worth_swapping(self, branch: Branch) -> bool:
        costs, tails = self.swap_costs, branch.request.task.tails()
        if costs is None:
            return True
        num_blocks = self.kv_cache.num_blocks_to_swap_out(branch, tails)
        num_tokens = self.kv_cache.num_tokens_to_recompute(branch) + branch.request.task.num_tail_tokens
        return num_blocks * costs.block <= num_tokens * costs.token

    def release(
        self, branches: list[Branch], trusted: bool = True, ended_well: bool = False, num_tokens: int | None = None
    ) -> None:
        """Remove ended branches from all queues, and free their memory. If their texts are complete (`ended_well`), it
        is leased if requested, and their hidden states are read if requested. `num_tokens`: a stop string cut the text
        after that many tokens."""
        waiting = {branch for branch in branches if branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED)}
        for branch in branches:
            request = branch.request
            request.task.release()
            self.resting.pop(branch, None)
            self.loads.forget(branch)
            if branch.media_end:
                self.media.cache.release(branch, trusted=trusted)
            is_there = self.discard_in_flight(branch)
            self.speculation.close(branch)
            is_text = ended_well and request.task.branches_are_texts
            if trusted and request.task.branches_are_texts:
                self.speculation.text_ended(branch)
            if not is_there:
                self.kv_cache.free(branch, trusted)
            if request.kv_transfer is not None and trusted and is_there:
                self.kv_cache.send_blocks(branch, request.kv_transfer)
            if is_text:
                self.readings.text_ended(branch, request, branch.choice, num_tokens)
                self.kv_cache.offer_text(branch, request.retention, request.retain_kv)
                self.end_in_session(branch, request)
            if not (is_text and is_there and self.lease(branch, request)):
                self.kv_cache.free(branch, trusted)
            branch.status = BranchStatus.FINISHED
            if branch.known_to_runner:
                self.finished_rows.append(branch.branch_id)
            del self.branches[branch.branch_id]
            self.all_or_none.pop(branch.branch_id, None)
            request.finished_choices.add(branch.choice)
            if len(request.finished_choices) == request.num_choices:
                self._forget(request)
        if len(waiting) < len(branches):
            self.running = [branch for branch in self.running if branch.status != BranchStatus.FINISHED]
        if waiting:
            self.waiting.remove(waiting)

    def end_in_session(self, ended: TokenSequence, request: Request) -> None:
        """A text has ended, and still has its memory: it may supersede earlier ones of its session."""
        if request.session is None:
            self.kv_cache.sessions.pass_text()
            return
        superseded = self.kv_cache.end_in_session(
            request.session, ended, request.num_prompt_tokens, request.request_id, request.is_branch
        )
        self.leases.note_superseded(superseded)

    def lease(self, ended: TokenSequence, request: Request) -> bool:
        """Lease the memory of an ended sequence. False: this was not requested, or exceeds the budget."""
        retain_kv = request.retain_kv
        return retain_kv is not None and self.leases.grant(
            ended, self.now + retain_kv, request.owner, request.external_id
        )

    def _forget(self, request: Request) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            self.shares.leave(request.owner, self.now)
            self._reserved_ids.difference_update(request.branch_ids)
            self.quarantined.pop(request.request_id, None)
            self.inherited.pop(request.request_id, None)
            if request.adapter is not None:
                self.adapters.leave(request, self.in_flight[-1].step if self.in_flight else 0)
            if request.continuation_of is not None:
                self.leases.continuation_left(request.continuation_of, request.request_id)

    def check(self, held: list[TokenSequence], own_running: set[Branch], own_waiting: set[Branch]) -> None:
        """Raise AssertionError unless queues, branches and memory agree with each other. Slow: for tests. `held`,
        `own_running`, `own_waiting`: what kinds of requests hold and queue beyond the shared queues."""
        holders = [*self.branches.values(), *self.leases.sequences(), *self.readings.held(), *held]
        self.kv_cache.check(holders, self.leases.moved_slots())
        self.leases.check()
        self.media.check(self.branches.values())
        self.speculation.check()
        self.shares.check(request.owner for request in self.requests.values())
        self.adapters.check(self.requests)
        running, waiting, loading = set(self.running), set(self.waiting), self.loads.outside()
        at_gate = self.adapters.outside()
        assert len(running) == len(self.running) and len(waiting) == len(self.waiting), "a branch is queued twice"
        assert self.events.request_ids() <= self.requests.keys(), "events of a request that is gone"
        assert self.quarantined.keys() <= self.requests.keys(), "a request is quarantined that is gone"
        queues = (running, waiting, loading, own_running, own_waiting, at_gate)
        assert set().union(*queues) == set(self.branches.values()), "the queues do not hold the unfinished branches"
        assert sum(map(len, queues)) == len(self.branches), "a branch is in several queues"
        assert self.all_or_none.keys() <= self.branches.keys(), "rows of a branch that is gone"
        num_rows = sum(branch.num_rows for branch in running)
        assert num_rows <= self.config.max_num_seqs, f"{num_rows} branches run, {self.config.max_num_seqs} may"
        for branch in running | own_running:
            assert branch.status == BranchStatus.RUNNING, f"{branch.branch_id} runs with status {branch.status!r}"
        assert self.loads.holders() <= waiting, "a branch that does not wait is kept with its blocks"
        for branch in waiting | own_waiting | loading | at_gate:
            assert branch.status in (BranchStatus.WAITING, BranchStatus.PREEMPTED), (
                f"{branch.branch_id}: {branch.status!r}"
            )
            may_hold = branch in loading or branch in self.loads.holders()
            assert may_hold or not any(branch.block_tables), f"{branch.branch_id} waits and holds blocks"
            assert may_hold or branch.num_computed_tokens == 0, f"{branch.branch_id} waits with computed tokens"
        for branch in self.branches.values():
            assert branch.num_tokens == len(branch.token_ids), f"{branch.branch_id}: miscounted tokens"
            assert branch.num_computed_tokens <= branch.num_tokens + branch.num_pending + branch.num_drafts, (
                f"{branch.branch_id}: more computed than there is"
            )
            assert branch.num_registered_tokens <= branch.num_tokens, f"{branch.branch_id}: unknown tokens were hashed"
            assert branch.num_tokens <= branch.max_total_tokens, f"{branch.branch_id} is longer than it may be"
            assert self.requests.get(branch.request_id) is branch.request, f"{branch.branch_id} has no request"
