"""All kinds of requests in a scheduler. A new kind is a file beside this one and a line in KINDS."""

from __future__ import annotations

from ratoon.core.request import EngineCoreRequest
from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.kinds.extraction import ExtractionKind
from ratoon.scheduling.kinds.generation import GenerationKind
from ratoon.scheduling.kinds.interface import RequestKind
from ratoon.scheduling.kinds.pooling import PoolingKind
from ratoon.scheduling.kinds.search import SearchKind
from ratoon.scheduling.preemption import Preemption
from ratoon.scheduling.shared_prefills import SharedPrefills
from ratoon.scheduling.state import SchedulerState

# In the order in which results are applied
KINDS: list[type[RequestKind]] = [GenerationKind, PoolingKind, SearchKind, ExtractionKind]


class Kinds:
    def __init__(self, state: SchedulerState, beginnings: SharedPrefills, preemption: Preemption) -> None:
        self.all = [kind(state, beginnings, preemption) for kind in KINDS]
        self.with_rows = [kind for kind in self.all if kind.plans_rows]
        self._by_params = {kind.params_type: kind for kind in self.all}
        self._by_task = {kind.task_type: kind for kind in self.all}

    def of(self, request: Request) -> RequestKind:
        return self._by_task[type(request.task)]

    def of_new(self, request: EngineCoreRequest) -> RequestKind:
        return self._by_params[type(request.params)]

    def queued(self) -> tuple[set[Branch], set[Branch]]:
        """The running and waiting branches in the kinds' own queues, for checks."""
        running, waiting = zip(*(kind.queued() for kind in self.all))
        return {branch for some in running for branch in some}, {branch for some in waiting for branch in some}
