"""Preemption: which branch is preempted when memory or rows are short. state.py frees or swaps its memory."""

from __future__ import annotations

from collections.abc import Callable

from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.state import SchedulerState
from ratoon.scheduling.step_draft import StepDraft


class Preemption:
    def __init__(self, state: SchedulerState) -> None:
        self.num_preemptions = 0
        # They free memory before any branch is preempted: each returns whether it did.
        self.free_first: list[Callable[[], bool]] = [state.readings.free_one, state.loads.free_one]
        self._state = state

    def make_room(self, step: StepDraft, branch: Branch) -> Branch | None:
        """A branch needs memory: leases are evicted first, then memory of texts that wait to be read and of kinds that
        yield to generation is freed, then the last running branch in the order is preempted and returned; if several
        owners compete, the last of the one that holds most. With steps in flight nothing is preempted, and the branch
        is left out of this step."""
        state = self._state
        if not state.may_take_memory:
            state.wants_drain = True
            return branch
        if state.leases.evict_one(state.spared_owners(branch)) or any(free() for free in self.free_first):
            return None
        tried = next(iter(state.quarantined.values()), None)  # others are preempted for it, whatever their order
        others = [other for other in state.running if other.request is not tried] or state.running
        victim = state.last_of_largest_owner(others) if state.shares.contended else None
        if victim is None:
            victim = max(others, key=state.order)
        self.preempt(step, victim)
        return victim

    def preempt(self, step: StepDraft, branch: Branch) -> None:
        """Free a branch's memory. What is neither swapped out nor in the prefix cache is computed again."""
        step.remove(branch)
        step.preempted = True
        if branch.known_to_runner:
            step.dropped_rows.append(branch.branch_id)
        self._state.running.remove(branch)
        self._state.reclaim(branch, may_swap=True)
        self._state.events.preempted(branch, self._state.now)
        self._state.waiting.prepend(branch)
        self.num_preemptions += 1

    def preempt_beyond_share(self, step: StepDraft, branch: Branch, running: list[Branch]) -> bool:
        """A waiting branch lacks a row or memory, and its owner runs less than its share: preempt the last branch of an
        owner that runs more than its share. One whose blocks of this step are prefix cache hits of branches that were
        admitted in it stays. False: there is none."""
        kv_cache = self._state.kv_cache
        free = [other for other in running if not kv_cache.shares_unwritten_blocks(other)]
        victim = self._state.find_one_beyond_its_share(branch, free)
        if victim is None:
            return False
        if not self._state.may_take_memory:
            self._state.wants_drain = True
            return False
        self.preempt(step, victim)
        step.preempted_for_share.add(victim)
        return True

    def preempt_another(self, step: StepDraft, request: Request) -> bool:
        """Preempt the last running branch of another request. False: there is none."""
        others = [other for other in self._state.running if other.request is not request]
        if others:
            self.preempt(step, max(others, key=self._state.order))
        return bool(others)
