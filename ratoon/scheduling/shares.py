"""Owners (API keys) that compete for an engine: what each was given, which is next, and whose branch is preempted.

An owner's counter grows with the tokens that are computed for it, and the waiting owner with the smallest goes first,
as in "Fairness in Serving Large Language Models" (Sheng et al., 2024). An owner that returns after a pause starts level
with the others: idle time earns no credit. Without owners there is one counter and nothing to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratoon.scheduling.branch import Branch

Owner = str | None

SECONDS_TO_RETURN = 60.0  # after its last request an owner is expected to have another one


class OwnerShares:
    """The owners of unfinished requests, and the tokens that were computed for each while several competed."""

    __slots__ = ("_left_at", "_num_requests", "_served")

    def __init__(self) -> None:
        self._num_requests: dict[Owner, int] = {}
        self._served: dict[Owner, int] = {}
        self._left_at: dict[Owner, float] = {}  # when an owner's last request ended, the earliest first

    @property
    def num_owners(self) -> int:
        return len(self._num_requests)

    @property
    def contended(self) -> bool:
        return len(self._num_requests) > 1

    def others_return(self, now: float) -> bool:
        """Whether an owner without requests had one recently."""
        while self._left_at:
            first = next(iter(self._left_at))
            if self._left_at[first] > now - SECONDS_TO_RETURN:
                return True
            del self._left_at[first]
        return False

    def served(self, owner: Owner) -> int:
        return self._served.get(owner, 0)

    def join(self, owner: Owner) -> None:
        """One more request of this owner."""
        if owner not in self._num_requests:
            self._left_at.pop(owner, None)
            least = min((self._served[other] for other in self._num_requests), default=0)
            self._served[owner] = max(self._served.get(owner, 0), least)
        self._num_requests[owner] = self._num_requests.get(owner, 0) + 1

    def leave(self, owner: Owner, now: float = 0.0) -> None:
        """One less. The counter of an owner without requests is dropped as soon as it has no effect."""
        left = self._num_requests[owner] - 1
        if left:
            self._num_requests[owner] = left
            return
        del self._num_requests[owner]
        self._left_at[owner] = now
        if not self.contended:
            self._served = dict.fromkeys(self._num_requests, 0)
            return
        least = min(self._served[other] for other in self._num_requests)
        self._served = {
            other: tokens for other, tokens in self._served.items() if other in self._num_requests or tokens > least
        }

    def charge(self, owner: Owner, num_tokens: int) -> None:
        self._served[owner] = self._served.get(owner, 0) + num_tokens

    def check(self, owners: Iterable[Owner]) -> None:
        """Raise AssertionError unless these are the owners of the unfinished requests."""
        assert Counter(owners) == self._num_requests, "owners of requests are miscounted"
        assert self._num_requests.keys() <= self._served.keys(), "an owner has no counter"


def fair_split(budget: int, wants: Mapping[Owner, int]) -> dict[Owner, int]:
    """Each owner's share of a budget (max-min fair): at most what it wants, and no less than another that wants as
    much."""
    given: dict[Owner, int] = {}
    left = budget
    for number, (owner, want) in enumerate(sorted(wants.items(), key=lambda item: item[1])):
        given[owner] = min(want, left // (len(wants) - number))
        left -= given[owner]
    return given


def tokens_of(branch: Branch) -> int:
    """The size of a running branch in tokens; each beam of a search counts as much as its trunk."""
    return branch.num_tokens * branch.num_rows


def rows_of(branch: Branch) -> int:
    return branch.num_rows


def held_by_owners(running: Iterable[Branch], size: Callable[[Branch], int]) -> Counter[Owner]:
    held: Counter[Owner] = Counter()
    for branch in running:
        held[branch.request.owner] += size(branch)
    return held


def last_of_largest(
    running: list[Branch],
    size: Callable[[Branch], int],
    order: Callable[[Branch], tuple[float, ...]],
    may_go: Callable[[Branch], bool],
    above: int = 0,
) -> Branch | None:
    """Returns the last preemptible branch, in the order, of the owner that holds most, and more than `above`.

    The first branch of each owner is never preempted: every owner makes progress.
    """
    held = held_by_owners(running, size)
    firsts: dict[Owner, Branch] = {}
    for branch in running:
        first = firsts.get(branch.request.owner)
        if first is None or order(branch) < order(first):
            firsts[branch.request.owner] = branch
    candidates = [
        branch
        for branch in running
        if held[branch.request.owner] > above and branch is not firsts[branch.request.owner] and may_go(branch)
    ]
    return max(candidates, key=lambda branch: (held[branch.request.owner], order(branch)), default=None)
