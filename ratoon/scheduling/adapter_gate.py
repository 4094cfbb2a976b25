"""Requests whose adapter is not on the device wait here, outside the queues: others overtake them.

A request passes when its adapter is in a slot, and holds the slot until it ends, preempted or not; so nothing that may
run waits for a slot. Where adapters are more than slots, the one whose request is first in the order gets the next
slot. If requests hold all of them, the slot with the fewest holders is freed: requests for its adapter that are later
in the order wait here too, so that it is free when those before them have ended. Every adapter has its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport
from ratoon.core.errors import RequestError
from ratoon.core.stats import AdapterStats
from ratoon.memory.adapter_slots import AdapterSlots
from ratoon.scheduling.branch import Branch, Request

Turn = Callable[[Branch], tuple[float, ...]]  # of a waiting branch: the lowest goes first


@dataclass(slots=True)
class Waiting:
    request: Request
    adapter: Adapter
    enqueue: Callable[[], None]  # puts it in the queue of its kind

    @property
    def branch(self) -> Branch:
        return self.request.branches[0]


class AdapterGate:
    def __init__(self, num_slots: int, turn: Turn) -> None:
        self._slots = AdapterSlots(num_slots)
        self._turn = turn
        self._waiting: dict[str, Waiting] = {}  # by request id
        self._holders: dict[str, Request] = {}  # by request id, those that hold a slot
        # Adapters whose slots are to be freed, each with the branch that waits for the slot
        self._drained: dict[str, Branch] = {}
        # Whether slots, or who may have them, have changed since waiting requests were last looked at
        self._may_load = self._may_let_through = False
        self._began: dict[str, float] = {}  # when loads began, by digest
        self._seconds = 0.0  # that loads took, in all

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def verify(self, adapter: Adapter | None) -> None:
        if adapter is not None and not len(self._slots):
            raise RequestError("adapter", "this engine has no memory for adapters", "one with enable_lora=True")

    # ---- requests ----

    def enter(self, request: Request, enqueue: Callable[[], None], now: float, *, at_once: bool = False) -> bool:
        """A request arrives. False: it waits here, and is put in its queue when its adapter is there. `at_once`: it
        belongs to one that holds the adapter, and waits for no turn."""
        adapter = request.adapter
        if adapter is None or ((at_once or self._may_pass(request, adapter)) and self._hold(request, adapter)):
            return True
        is_new = all(waiting.adapter.digest != adapter.digest for waiting in self._waiting.values())
        self._waiting[request.request_id] = Waiting(request, adapter, enqueue)
        if is_new:  # what arrives behind it must not take the slot that is freed for it
            self._may_load = True
            self.begin_loads(now)
        return False

    def leave(self, request: Request, last_step: int) -> None:
        """A request has ended. Steps up to this number may still read its slot."""
        if self._waiting.pop(request.request_id, None) is not None:
            self._stop_draining_for(request)
            self._may_load = True
        if self._holders.pop(request.request_id, None) is not None:
            self._slots.release(request.adapter_slot, last_step)
            self._may_load = True

    def _may_pass(self, request: Request, adapter: Adapter) -> bool:
        """Whether a request may take the slot of its adapter, if it is there. Where the slot is to be freed, only
        requests before the one that it is freed for may."""
        waiting = self._drained.get(adapter.digest)
        return waiting is None or self._turn(request.branches[0]) < self._turn(waiting)

    def _hold(self, request: Request, adapter: Adapter) -> bool:
        number = self._slots.hold(adapter.digest)
        if number is None:
            return False
        request.adapter_slot = number
        self._holders[request.request_id] = request
        return True

    def let_through(self) -> list[tuple[Request, RequestError]]:
        """Puts requests in their queues whose adapters are there. Returns those that their queues refuse."""
        refused: list[tuple[Request, RequestError]] = []
        if not self._may_let_through:
            return refused
        self._may_let_through = False
        for waiting in self._in_order():
            request = waiting.request
            if not self._may_pass(request, waiting.adapter) or not self._hold(request, waiting.adapter):
                continue
            del self._waiting[request.request_id]
            self._stop_draining_for(request)
            try:
                waiting.enqueue()
            except RequestError as error:
                refused.append((request, error))
        return refused

    def _stop_draining_for(self, request: Request) -> None:
        left = {digest: branch for digest, branch in self._drained.items() if branch.request is not request}
        self._may_let_through |= len(left) < len(self._drained)
        self._drained = left

    def _in_order(self) -> list[Waiting]:
        return sorted(self._waiting.values(), key=lambda waiting: self._turn(waiting.branch))

    # ---- slots ----

    def begin_loads(self, now: float) -> None:
        """Begins to load adapters that requests wait for, those of the first in the order first. Where there is no slot
        for one, chooses the slot that is freed for it."""
        if not self._waiting or not (self._may_load or self._slots.has_free):
            return
        self._may_load = False
        drained, self._drained = self._drained, {}
        freed_for = {branch: digest for digest, branch in drained.items()}
        seen: set[str] = set()
        for waiting in self._in_order():
            digest = waiting.adapter.digest
            if digest in seen or self._slots.has(digest):
                continue
            seen.add(digest)
            if self._slots.load(waiting.adapter):
                self._began[digest] = now
                continue
            chosen = freed_for.get(waiting.branch)  # the same as before, or it would never be free
            if chosen is None or chosen in self._drained or not self._slots.is_loaded(chosen):
                chosen = next((other for other in self._slots.in_use() if other not in self._drained), None)
            if chosen is not None:
                self._drained[chosen] = waiting.branch
        self._may_let_through |= self._drained != drained

    def take_loads(self) -> list[AdapterLoad]:
        """What the plan tells workers to load."""
        return self._slots.take_loads()

    def take_report(self, report: AdapterReport, now: float) -> list[tuple[Request, RequestError]]:
        """Adapters were loaded, or could not be. Returns the requests that can't be served."""
        loaded, failed = self._slots.take_report(report)
        self._may_load = self._may_let_through = True
        for digest in (*loaded, *failed):
            self._seconds += max(0.0, now - self._began.pop(digest, now))
        problems: list[tuple[Request, RequestError]] = []
        for waiting in self._waiting.values() if failed else ():
            problem = failed.get(waiting.adapter.digest)
            if problem is not None:
                error = RequestError("adapter", f"{waiting.adapter.path} can't be loaded: {problem}", "files that can")
                problems.append((waiting.request, error))
        return problems

    def step_done(self, step: int) -> None:
        self._slots.step_done(step)

    def send_again(self) -> None:
        """Steps failed: the next plan tells workers again of all loads that are not known to have ended."""
        self._slots.send_again()

    @property
    def awaits_load(self) -> bool:
        """Whether requests wait for adapters that are being loaded."""
        return bool(self._waiting) and self._slots.is_loading

    # ---- figures and checks ----

    def waiting(self) -> Iterator[Request]:
        return (waiting.request for waiting in self._waiting.values())

    def stats(self) -> AdapterStats:
        return AdapterStats(
            num_slots=len(self._slots),
            num_loaded=self._slots.num_loaded,
            num_waiting=len(self._waiting),
            loads=self._slots.num_loads,
            failed=self._slots.num_failed,
            evicted=self._slots.num_evicted,
            seconds=self._seconds,
            holders=self._slots.holders(),
        )

    def outside(self) -> set[Branch]:
        """The unfinished branches of requests that wait here, for checks."""
        return {branch for one in self._waiting.values() for branch in one.request.unfinished_branches}

    def check(self, requests: dict[str, Request]) -> None:
        """Raise AssertionError unless slots, holders and requests agree. Slow: for tests."""
        assert self._waiting.keys() | self._holders.keys() <= requests.keys(), "a request that is gone has a slot"
        assert self._waiting.keys().isdisjoint(self._holders), "a request waits for a slot that it holds"
        using = {name for name, request in requests.items() if request.adapter is not None}
        assert using == self._waiting.keys() | self._holders.keys(), "a request with an adapter has no slot"
        for request in self._holders.values():
            assert request.adapter is not None
            assert self._slots.number_of(request.adapter.digest) == request.adapter_slot, "a slot has another adapter"
        self._slots.check(Counter(request.adapter_slot for request in self._holders.values()))
