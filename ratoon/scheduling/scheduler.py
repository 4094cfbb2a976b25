"""The scheduler: the interface to requests and queues (state), the plan of a step (planner) and its results (results).

No clock, no tensors and no text here; the KVCacheManager counts the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import KVCacheConfig, SwapCosts
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.readings import reading_id
from ratoon.core.request import EndedLease, EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.core.speculation import SpeculationConfig
from ratoon.core.stats import SchedulerStats
from ratoon.memory.hashing import ExtraKeys
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.scheduling.branch import Branch, BranchStatus, tagged_keys
from ratoon.scheduling.kinds.registry import Kinds
from ratoon.scheduling.planner import StepPlanner
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.results import StepResults
from ratoon.scheduling.shared_prefills import SharedPrefills
from ratoon.scheduling.state import SchedulerState


class Scheduler:
    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_config: KVCacheConfig,
        max_model_len: int,
        swap_costs: SwapCosts | None = None,
        speculation: SpeculationConfig | None = None,
        num_adapter_slots: int = 0,
        draft_cost: float = 0.0,
    ) -> None:
        self.config = scheduler_config
        self.max_model_len = max_model_len
        self.kv_cache = KVCacheManager(kv_config, max_model_len, cache_config.enable_prefix_caching)
        self.leases = LeaseTable(self.kv_cache, int(self.kv_cache.num_usable_blocks * cache_config.lease_fraction))
        self.state = SchedulerState(
            scheduler_config,
            self.kv_cache,
            self.leases,
            swap_costs,
            speculation,
            num_adapter_slots,
            draft_cost,
            cache_config.encoder_cache_size,
        )
        beginnings, self.preemption = SharedPrefills(self.state), Preemption(self.state)
        self.kinds = Kinds(self.state, beginnings, self.preemption)
        self.planner = StepPlanner(self.state, self.kinds, beginnings, self.preemption)
        self.results = StepResults(self.state, self.kinds)
        self._num_added = 0

    # ---- requests ----

    def add_request(self, request: EngineCoreRequest, now: float | None = None) -> None:
        """Queue a request at time `now` (default: the last known time). Raises RequestError for one that cannot be
        served, and for an id in use."""
        if now is not None:
            self.state.now = now
        kind = self.kinds.of_new(request)
        packed = kind.verify(request)
        opened = kind.open(request, self._num_added)
        opened.packed_prompt = packed
        self.state.verify_ids(opened)
        if self.state.adapters.enter(opened, lambda: kind.enqueue(opened), self.state.now):
            kind.enqueue(opened)
        self.state.add(opened)
        self._num_added += 1

    def abort_requests(self, ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Abort requests by id, or one of several choices by `id#choice`. Unknown and finished ids are ignored."""
        outputs = []
        for some_id in ids:
            self.state.readings.drop(some_id)
            request = self.state.requests.get(some_id)
            if request is not None:
                outputs += self.state.end_requests([request], FinishReason.ABORT)
            else:
                outputs += self._abort_choice(some_id)
        return outputs

    def _abort_choice(self, choice_id: str) -> list[EngineCoreOutput]:
        request_id, _, number = choice_id.rpartition("#")
        request = self.state.requests.get(request_id)
        if request is None or len(request.branches) < request.num_choices:  # not forked: no choice has a token yet
            return []
        for branch in request.branches:
            if str(branch.choice) == number and branch.status != BranchStatus.FINISHED:
                return self._end_branch(branch)
        return []

    def _end_branch(
        self, branch: Branch, ended_well: bool = False, num_tokens: int | None = None
    ) -> list[EngineCoreOutput]:
        output = EngineCoreOutput(
            branch.request_id, [], branch.choice, FinishReason.ABORT, num_cached_tokens=branch.num_cached_tokens
        )
        self.state.events.tell([output])
        self.state.release([branch], ended_well=ended_well, num_tokens=num_tokens)
        return [output]

    def stop_requests(self, stopped: Mapping[str, int | None]) -> list[EngineCoreOutput]:
        """The front end ended these branches at a stop string, after so many tokens where hidden states are read: their
        texts are complete. Where the text had ended here already, this tells how much of it counts."""
        outputs = []
        for branch_id, num_tokens in stopped.items():
            branch = self.state.branches.get(branch_id)
            if branch is not None:
                outputs += self._end_branch(branch, ended_well=True, num_tokens=num_tokens)
            elif num_tokens is not None and not self.state.readings.tell(reading_id(branch_id), num_tokens):
                outputs += self._miss(reading_id(branch_id))
        return outputs

    def _miss(self, name: str) -> list[EngineCoreOutput]:
        """A reading is expected of a branch that failed in the meantime, unless it runs already: stops may come
        twice."""
        if name in self.state.requests:
            return []
        problem = "the request failed before its hidden states could be read"
        return [EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, error=problem)]

    def fail_requests(self, ids: Iterable[str], message: str) -> list[EngineCoreOutput]:
        """End requests, named by their ids or by those of their branches, with an error.

        For a step that raised: name every branch of its plan, before anything else is done with the scheduler. Their
        blocks leave the prefix cache, because their content is undefined after the failure.
        """
        return self.state.fail_requests(ids, message)

    def step_failed(self, plan: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """The oldest step in flight raised, and later ones were skipped. Call this before anything else is done with
        the scheduler.

        A request alone in the step is the cause, and fails. With several, or with loads, the cause is unknown: all are
        preempted, and each runs alone until it gets a result; the faulty one then fails alone, and the others go on.
        Requests of the skipped steps are planned again. Blocks that the step may have corrupted leave the prefix cache.
        """
        state = self.state
        assert state.in_flight and state.in_flight[0] is plan, "the oldest step in flight fails first"
        failed = state.steps_failed()
        still_there = self._still_there(plan)
        suspects = state.find_requests(still_there)
        outputs = state.loads_of_adapters_failed(failed, message)
        is_alone = len(suspects) == 1 and len(still_there) == len(plan.req_ids)
        if is_alone and not plan.loads and not plan.adapter_loads:
            outputs += state.fail_requests([suspects[0].request_id], message)
        else:
            state.quarantined.update((request.request_id, request) for request in suspects)
        self._plan_anew(failed)
        return outputs

    def _still_there(self, plan: SchedulerOutput) -> list[str]:
        """The branches of a plan that have not ended since. Ids may have been reused."""
        branches = self.state.branches
        return [name for name in plan.req_ids if name in branches and branches[name].first_step <= plan.step]

    def _plan_anew(self, failed: list[SchedulerOutput]) -> None:
        """Preempt the branches of these plans; they wait in front of later ones."""
        state = self.state
        found = {name: state.branches[name] for plan in failed for name in self._still_there(plan)}
        for plan in failed:
            for kind in self.kinds.all:
                kind.unfork(plan)
        for branch in found.values():
            if branch.known_to_runner:
                state.finished_rows.append(branch.branch_id)
            state.reclaim(branch, trusted=False)
            state.events.preempted(branch, state.now)
        state.running = [branch for branch in state.running if branch.status == BranchStatus.RUNNING]
        for branch in sorted(found.values(), key=state.order, reverse=True):
            self.kinds.of(branch.request).enqueue_again(branch)

    def forget_roots(self, branch_ids: Iterable[str]) -> None:
        """Roots are gone: nothing is drafted from the texts of these branches any more. Unknown ids are ignored."""
        self.state.speculation.forget_texts(branch_ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self.state.requests)

    @property
    def num_requests(self) -> int:
        return len(self.state.requests)

    def has_requests(self) -> bool:
        """Whether there is anything to plan: unfinished requests, rows for the runner to drop, or blocks that are being
        loaded, whose end a step tells."""
        is_told = self.state.finished_rows or self.kv_cache.store.arriving_blocks
        return bool(self.state.requests) or bool(is_told)

    def tick(self, now: float) -> list[EngineCoreOutput]:
        """Set the current time: expired leases and overdue requests end."""
        self.state.now = now
        self.leases.expire(now)
        overdue = [output for kind in self.kinds.all for output in kind.end_overdue()]
        return overdue + self.state.admit_with_adapters()

    def restore_leases(self, leases: Sequence[EndedLease], now: float) -> list[str]:
        """Leases of an earlier process go on. Returns the branches of those that do."""
        restored = []
        for lease in leases:
            keys = ExtraKeys(tagged_keys(lease.adapter, lease.cache_salt, lease.encoder_input))
            if self.leases.restore(lease, keys, now):
                restored.append(lease.branch_id)
        return restored

    def next_expiry(self) -> float | None:
        """When the next lease or deadline ends; None: there is none."""
        ends = (self.leases.next_expiry(), *(kind.next_deadline() for kind in self.kinds.all))
        return min((end for end in ends if end is not None), default=None)

    # ---- one step ----

    def schedule(self) -> SchedulerOutput:
        """Plan a step, possibly before the results of earlier ones are known. Plans must be executed in order; void
        ones may be skipped."""
        return self.planner.plan()

    @property
    def can_plan(self) -> bool:
        """False: the next plan must wait until no step is in flight, because a branch must be preempted, or because a
        request runs alone until it gets a result; or it should wait, because branches with drafts are in flight."""
        state = self.state
        if not state.in_flight:
            return True
        if state.wants_drain or state.quarantined:
            return False
        may_admit = state.waiting and len(state.running) < state.config.max_num_seqs
        return bool(may_admit) or not state.speculation.gathers(state.running)

    @property
    def has_work_beside_step(self) -> bool:
        return self.kv_cache.prefix_cache.has_unregistered_blocks or self.state.speculation.has_work_beside_step

    def work_beside_step(self) -> None:
        """What planning has left undone, because it can be done while the step runs."""
        self.kv_cache.register_blocks()
        self.state.speculation.work_beside_step()

    def step_done(self, plan: SchedulerOutput, now: float | None = None, has_prepared: bool = False) -> None:
        """A plan was executed at time `now` (default: the last known time): its keys and values are written.
        `update_from_output` passes what it sampled; requests may be aborted in between."""
        if now is not None:
            self.state.now = now
        self.state.step_done(plan, has_prepared)

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float | None = None
    ) -> list[EngineCoreOutput]:
        """Apply the results of a plan. Results for branches that ended while the step ran are dropped."""
        self.step_done(plan, now)
        return self.results.take(plan, output)

    # ---- figures and checks ----

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks and outputs of the encoder, and end all leases. Refused (False) while any request is
        unfinished."""
        if self.state.requests:
            return False
        self.leases.end_all()
        self.state.media.cache.reset()
        return self.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.state.running),
            num_waiting=len(self.state.waiting) + len(self.state.loads) + len(self.state.adapters),
            kv_usage=self.kv_cache.usage,
            num_preemptions=self.preemption.num_preemptions,
            num_scheduled_tokens=self.planner.num_scheduled_tokens,
            num_steps=self.planner.num_steps,
            prefix_cache=msgspec.structs.replace(self.kv_cache.prefix_cache.stats),
            leases=self.leases.snapshot(),
            num_encoder_runs=self.planner.num_encoder_runs,
            store=self.kv_cache.store.snapshot(),
            drafts=self.state.speculation.snapshot(),
            adapters=self.state.adapters.stats(),
            sessions=self.kv_cache.sessions.snapshot(),
        )

    def check(self) -> None:
        """Raise AssertionError unless queues, branches and memory agree with each other. Slow: for tests."""
        held = [sequence for kind in self.kinds.all for sequence in kind.held()]
        self.state.check(held, *self.kinds.queued())
