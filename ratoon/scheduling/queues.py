"""Waiting branches in the order in which they may start. Order only: the scheduler decides whether one fits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator

from ratoon.core.config import SchedulingPolicy
from ratoon.scheduling.branch import Branch
from ratoon.scheduling.shares import Owner, OwnerShares

SortKey = Callable[[Branch], tuple[float, ...]]


def first_come_order(branch: Branch) -> tuple[float, ...]:
    return branch.order[1:]


def priority_order(branch: Branch) -> tuple[float, ...]:
    return branch.order


def sort_key_for(policy: SchedulingPolicy) -> SortKey:
    """The order of admission; preemption takes the last first."""
    return priority_order if policy == SchedulingPolicy.PRIORITY else first_come_order


class FirstComeQueue:
    """Arrival order. Preempted branches are put back in front: they arrived before all that still wait."""

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

    def insert(self, branch: Branch) -> None:
        """Puts a branch behind those that arrived before it."""
        place = len(self._branches)
        while place and first_come_order(self._branches[place - 1]) > first_come_order(branch):
            place -= 1
        self._branches.insert(place, branch)

    def peek(self) -> Branch:
        return self._branches[0]

    def pop(self) -> Branch:
        return self._branches.popleft()

    def remove(self, branches: set[Branch]) -> None:
        self._branches = deque(branch for branch in self._branches if branch not in branches)


class PriorityQueue:
    """Lower priority values first, then earlier arrival, then the order of adding. `prepend` is `add`: a preempted
    branch keeps its priority and arrival, which decide."""

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

    def insert(self, branch: Branch) -> None:
        self.add(branch)

    def peek(self) -> Branch:
        return self._heap[0][1]

    def pop(self) -> Branch:
        return heapq.heappop(self._heap)[1]

    def remove(self, branches: set[Branch]) -> None:
        self._heap = [entry for entry in self._heap if entry[1] not in branches]
        heapq.heapify(self._heap)


class FairQueue:
    """A queue for each owner, in the policy's order. Among owners, the better priority goes first (priority policy
    only), then the owner that was given least. Without owners it is a single queue."""

    def __init__(self, policy: SchedulingPolicy, shares: OwnerShares) -> None:
        self._knows_priorities = policy == SchedulingPolicy.PRIORITY
        self._order = sort_key_for(policy)
        self._shares = shares
        self._queues: dict[Owner, FirstComeQueue | PriorityQueue] = {}  # none of them empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Branch]:
        return (branch for queue in self._queues.values() for branch in queue)

    def owners(self) -> Collection[Owner]:
        return self._queues.keys()

    def of_owner(self, owner: Owner) -> Iterator[Branch]:
        """This owner's branches, in the order in which they may start."""
        return iter(self._queues[owner])

    def add(self, branch: Branch) -> None:
        self._queue_of(branch).add(branch)

    def prepend(self, branch: Branch) -> None:
        self._queue_of(branch).prepend(branch)

    def insert(self, branch: Branch) -> None:
        """Puts a branch that waited elsewhere in its place in the order."""
        self._queue_of(branch).insert(branch)

    def peek(self) -> Branch:
        """The next branch to admit."""
        heads = [queue.peek() for queue in self._queues.values()]
        return heads[0] if len(heads) == 1 else min(heads, key=self.turn)

    def peek_among(self, may_start: Callable[[Owner], bool]) -> Branch | None:
        """The next branch of the owners that may have one started."""
        heads = [queue.peek() for owner, queue in self._queues.items() if may_start(owner)]
        return min(heads, key=self.turn, default=None)

    def take(self, branch: Branch) -> None:
        """Remove the branch that `peek` returned."""
        owner = branch.request.owner
        taken = self._queues[owner].pop()
        assert taken is branch, "it is not its owner's first"
        if not self._queues[owner]:
            del self._queues[owner]

    def remove(self, branches: set[Branch]) -> None:
        for owner in {branch.request.owner for branch in branches} & self._queues.keys():
            self._queues[owner].remove(branches)
            if not self._queues[owner]:
                del self._queues[owner]

    def _queue_of(self, branch: Branch) -> FirstComeQueue | PriorityQueue:
        owner = branch.request.owner
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = PriorityQueue() if self._knows_priorities else FirstComeQueue()
        return queue

    def turn(self, branch: Branch) -> tuple[float, ...]:
        """What decides among the first branches of owners: the lowest goes first."""
        priority = branch.request.priority if self._knows_priorities else 0
        return priority, self._shares.served(branch.request.owner), *self._order(branch)
