"""Slots of adapters as the runner without a model has them: files take steps to read, and a slot that is being written
has no content."""

from __future__ import annotations

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport
from ratoon.core.request import EngineCoreRequest

ADAPTERS = [Adapter(f"{number:032x}", f"/adapters/{number}", 8) for number in range(1, 7)]


class FakeAdapters:
    def __init__(self, num_slots: int = 0, slowness: int = 0, broken: frozenset[str] = frozenset()) -> None:
        self._num_slots = num_slots
        self._slowness = slowness  # steps that a load takes, at the most
        self._broken = broken  # digests of files that can't be read
        self._there: dict[int, str] = {}  # what each slot has
        self._under_way: dict[int, tuple[str, int]] = {}  # by slot: the digest, and the steps that are left
        self._told: set[int] = set()  # slots whose loads were reported

    def announce(self, loads: list[AdapterLoad]) -> None:
        """A plan is handed over. What steps in flight read must not be written: a device is behind with them."""
        for load in loads:
            assert 0 <= load.slot < self._num_slots
            if self._there.get(load.slot) != load.adapter.digest:
                self._there.pop(load.slot, None)

    def load(self, loads: list[AdapterLoad]) -> None:
        self.announce(loads)
        for load in loads:
            digest = load.adapter.digest
            known = self._under_way.get(load.slot, (self._there.get(load.slot), 0))[0]
            if known != digest:
                self._under_way[load.slot] = digest, int(digest, 16) % (self._slowness + 1)
            self._told.discard(load.slot)

    def report(self) -> AdapterReport | None:
        report = AdapterReport([], {})
        for slot, (digest, num_left) in list(self._under_way.items()):
            self._under_way[slot] = digest, num_left - 1
            if num_left > 0:
                continue
            del self._under_way[slot]
            if digest in self._broken:
                report.failed[slot] = "it is broken"
            else:
                self._there[slot] = digest
                report.loaded.append(slot)
        report.loaded += [slot for slot in self._there if slot not in self._told and slot not in report.loaded]
        self._told.update(report.loaded)
        return report if report.loaded or report.failed else None

    def read(self, slot: int, request: EngineCoreRequest) -> None:
        if request.adapter is None:
            assert slot == -1, f"{request.request_id} asked for no adapter"
        else:
            assert self._there.get(slot) == request.adapter.digest, f"{request.request_id} reads another adapter"
