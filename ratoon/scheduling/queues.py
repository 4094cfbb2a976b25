"""Waiting branches in the order in which they may start. Order only: whether one fits is the scheduler's question."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from ratoon.core.config import SchedulingPolicy
from ratoon.scheduling.branch import Branch

SortKey = Callable[[Branch], tuple[float, ...]]


def first_come_order(branch: Branch) -> tuple[float, ...]:
    return branch.order[1:]


def priority_order(branch: Branch) -> tuple[float, ...]:
    return branch.order


def sort_key_for(policy: SchedulingPolicy) -> SortKey:
    """Who goes first (and, seen from the other end, who is preempted first)."""
    return priority_order if policy == SchedulingPolicy.PRIORITY else first_come_order


class FirstComeQueue:
    """Arrival order. What was preempted is put back in front: it came before everything that still waits."""

    def __init__(self) -> None:
        self._branches: deque[Branch] = deque()

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def add(self, branch: Branch) -> None:
        self._branches.append(branch)

    def prepend(self, branch: Branch) -> None:
        self._branches.appendleft(branch)

    def peek(self) -> Branch:
        return self._branches[0]

    def pop(self) -> Branch:
        return self._branches.popleft()

    def remove(self, branches: set[Branch]) -> None:
        self._branches = deque(branch for branch in self._branches if branch not in branches)


class PriorityQueue:
    """Lower priority values first, then earlier arrival, then the order of adding. `prepend` needs no place of its own:
    a preempted branch kept its priority and its arrival, and these decide."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Branch]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Branch]:
        return (branch for _, branch in sorted(self._heap, key=lambda entry: entry[0]))

    def add(self, branch: Branch) -> None:
        heapq.heappush(self._heap, (priority_order(branch), branch))  # orders are unique: branches are never compared

    def prepend(self, branch: Branch) -> None:
        self.add(branch)

    def peek(self) -> Branch:
        return self._heap[0][1]

    def pop(self) -> Branch:
        return heapq.heappop(self._heap)[1]

    def remove(self, branches: set[Branch]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in branches]
        heapq.heapify(self._heap)


WaitingQueue = FirstComeQueue | PriorityQueue


def queue_for(policy: SchedulingPolicy) -> WaitingQueue:
    return PriorityQueue() if policy == SchedulingPolicy.PRIORITY else FirstComeQueue()
