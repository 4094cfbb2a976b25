"""Jobs of several owners that wait for one of a few places: owners take turns, and no owner has all places."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")


class Turns(Generic[Job]):
    """Places for jobs, which owners take in turns. One owner has all places but one at most, so that another owner's
    job begins at once, or behind that of a third one. There is no clock here, and there are no locks."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._most = max(1, num_places - 1)
        self._waiting: OrderedDict[str | None, deque[Job]] = OrderedDict()  # the owner whose turn is next comes first
        self._running: Counter[str | None] = Counter()

    def __len__(self) -> int:
        """The jobs that wait."""
        return sum(map(len, self._waiting.values()))

    def num_waiting_of(self, owner: str | None) -> int:
        return len(self._waiting.get(owner, ()))

    def num_running_of(self, owner: str | None) -> int:
        return self._running[owner]

    def add(self, owner: str | None, job: Job) -> None:
        self._waiting.setdefault(owner, deque()).append(job)

    def remove(self, owner: str | None, job: Job) -> bool:
        """False: it does not wait."""
        jobs = self._waiting.get(owner, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[owner]
        return True

    def begin(self) -> tuple[str | None, Job] | None:
        """The next job, and its owner; it has a place until `end`. None: no job waits, or there is no place for it."""
        if self._running.total() >= self._num_places:
            return None
        for owner, jobs in self._waiting.items():
            if self._running[owner] < self._most:
                job = jobs.popleft()
                del self._waiting[owner]
                if jobs:
                    self._waiting[owner] = jobs  # behind all others
                self._running[owner] += 1
                return owner, job
        return None

    def end(self, owner: str | None) -> None:
        """A job of this owner has ended, and its place is free."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
