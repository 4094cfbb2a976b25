"""The scheduler: the entry to requests and queues (state), what runs in a step (planner), what it brought (results).

Knows no clock, no tensor and no text; the memory that it hands out is counted by the KVCacheManager.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ratoon.core.config import CacheConfig, SchedulerConfig
from ratoon.core.kv import KVCacheConfig
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from ratoon.core.stats import SchedulerStats
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.leases import LeaseTable
from ratoon.scheduling.beginnings import Beginnings
from ratoon.scheduling.branch import BranchStatus
from ratoon.scheduling.kinds.registry import Kinds
from ratoon.scheduling.planner import StepPlanner
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.results import StepResults
from ratoon.scheduling.state import SchedulerState


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
        self.state = SchedulerState(scheduler_config, self.kv_cache, self.leases)
        beginnings, self.preemption = Beginnings(self.state), Preemption(self.state)
        self.kinds = Kinds(self.state, beginnings, self.preemption)
        self.planner = StepPlanner(self.state, self.kinds, beginnings, self.preemption)
        self.results = StepResults(self.state, self.kinds)
        self._num_added = 0

    # ---- requests come and go ----

    def add_request(self, request: EngineCoreRequest, now: float | None = None) -> None:
        """Queue a request at this time, which unless given is the last that was told. Raises RequestError for one that
        could never be served, and for an id that is in use."""
        if now is not None:
            self.state.now = now
        kind = self.kinds.of_new(request)
        kind.verify(request)
        opened = kind.open(request, self._num_added)
        self.state.verify_ids(opened)
        kind.enqueue(opened)
        self.state.add(opened)
        self._num_added += 1

    def abort_requests(self, ids: Iterable[str], keep: bool = False) -> list[EngineCoreOutput]:
        """End what callers no longer want: whole requests by their ids, one choice of several by `id#choice`. Ids that
        are unknown or finished are passed over. `keep`: a stop string ended them on the other side, and their memory
        is leased where that was asked for."""
        outputs = []
        for some_id in ids:
            request = self.state.requests.get(some_id)
            if request is not None:
                outputs += self.state.end_requests([request], FinishReason.ABORT, keep=keep)
            else:
                outputs += self._abort_choice(some_id, keep)
        return outputs

    def _abort_choice(self, choice_id: str, keep: bool) -> list[EngineCoreOutput]:
        request_id, _, number = choice_id.rpartition("#")
        request = self.state.requests.get(request_id)
        if request is None or len(request.branches) < request.num_choices:  # not forked: none has a token to stop at
            return []
        for branch in request.branches:
            if str(branch.choice) == number and branch.status != BranchStatus.FINISHED:
                output = EngineCoreOutput(
                    request_id, [], branch.choice, FinishReason.ABORT, num_cached_tokens=branch.num_cached_tokens
                )
                self.state.events.tell([output])
                self.state.release([branch], keep=keep)
                return [output]
        return []

    def fail_requests(self, ids: Iterable[str], message: str) -> list[EngineCoreOutput]:
        """End requests, named by their ids or by those of their branches, with an error.

        For a step that raised: name every branch of its plan, before anything else is done with the scheduler. None of
        their blocks will be found in the prefix cache again, for nobody knows what the step has left in them.
        """
        return self.state.fail_requests(ids, message)

    def try_apart(self, plan: SchedulerOutput) -> bool:
        """A step raised, and nobody knows whose fault it was. Its requests give their memory back, and each runs alone
        until it has got a token: the one at fault then fails alone, and the others go on. Nothing that the step may
        have spoilt is found again. False: there is only one request in it, so it is known whose fault it was.

        Call it before anything else is done with the scheduler, as with `fail_requests`.
        """
        requests = self.state.find_requests(plan.req_ids)
        if len(requests) == 1:
            return False
        for kind in self.kinds.all:
            kind.unfork(plan)
        branches = [self.state.branches[branch_id] for branch_id in plan.req_ids if branch_id in self.state.branches]
        for branch in branches:
            if branch.known_to_runner:
                self.state.finished_rows.append(branch.branch_id)
            self.state.set_back(branch, trusted=False)
            self.state.events.preempted(branch, self.state.now)
        self.state.running = [branch for branch in self.state.running if branch.status == BranchStatus.RUNNING]
        for branch in sorted(branches, key=self.state.order, reverse=True):
            self.kinds.of(branch.request).enqueue_again(branch)
        self.state.quarantined.update((request.request_id, request) for request in requests)
        return True

    def say_again(self, plan: SchedulerOutput) -> None:
        """A step raised, perhaps before the runner heard who had left: it is told with the next plan. Nor is it known
        whether blocks had come to the host."""
        self.state.events.step_done(self.state.now)
        self.state.finished_rows += plan.finished_req_ids + plan.preempted_req_ids
        if plan.swapped_out:
            self.kv_cache.distrust_swaps(plan.swapped_out)

    def has_unfinished_requests(self) -> bool:
        return bool(self.state.requests)

    def has_requests(self) -> bool:
        """Is there anything to plan: unfinished requests, or rows that the runner should drop?"""
        return bool(self.state.requests) or bool(self.state.finished_rows)

    def tick(self, now: float) -> list[EngineCoreOutput]:
        """What time it is: leases and deadlines count from here, and end."""
        self.state.now = now
        self.leases.expire(now)
        return [output for kind in self.kinds.all for output in kind.end_overdue()]

    def next_expiry(self) -> float | None:
        """When the next lease or deadline ends; None: there is none."""
        ends = (self.leases.next_expiry(), *(kind.next_deadline() for kind in self.kinds.all))
        return min((end for end in ends if end is not None), default=None)

    # ---- one step ----

    def schedule(self) -> SchedulerOutput:
        """Plan a step."""
        return self.planner.plan()

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput, now: float | None = None
    ) -> list[EngineCoreOutput]:
        """Take in the results of a plan, at this time, which unless given is the last that was told. Results for
        branches that ended while the step ran are dropped."""
        if now is not None:
            self.state.now = now
        self.state.events.step_done(self.state.now)
        return self.results.take(plan, output)

    # ---- figures and checks ----

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, and end all leases. Refused (False) while any request is under way."""
        if self.state.requests:
            return False
        self.leases.end_all()
        return self.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.state.running),
            num_waiting=len(self.state.waiting),
            kv_usage=self.kv_cache.usage,
            num_preemptions=self.preemption.num_preemptions,
            num_scheduled_tokens=self.planner.num_scheduled_tokens,
            num_steps=self.planner.num_steps,
            prefix_cache=msgspec.structs.replace(self.kv_cache.prefix_cache_stats),
            leases=self.leases.snapshot(),
            num_encoder_runs=self.planner.num_encoder_runs,
        )

    def check(self) -> None:
        """Raise AssertionError unless queues, branches and memory agree with each other. Slow: for tests."""
        held = [sequence for kind in self.kinds.all for sequence in kind.held()]
        self.state.check(held, *self.kinds.queued())
