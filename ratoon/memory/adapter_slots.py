"""Slots for adapters (LoRA) on the device: which adapter each has, and how many requests use it. Accounting only.

A slot is empty, or an adapter is being read into it, or the adapter is there. Requests that may run hold the slot of
their adapter; of those that no request holds, the one that was used longest ago gets another adapter first. Files are
read in the background, beside steps: a slot gets another adapter only when no step that reads it is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratoon.core.adapters import Adapter, AdapterLoad, AdapterReport

NO_SLOT = -1  # the base model alone


@dataclass(slots=True)
class Slot:
    number: int
    adapter: Adapter | None = None
    is_loaded: bool = False
    num_holders: int = 0
    last_step: int = 0  # that may read it, since it was last held
    last_use: int = 0  # rises with every use


class AdapterSlots:
    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot(number) for number in range(num_slots)]
        self._of: dict[str, Slot] = {}  # by digest, those with an adapter
        self._to_send: list[AdapterLoad] = []  # with the next plan
        self._num_uses = 0
        self._last_done = 0  # the number of the last step that is done
        self.num_loads = 0  # adapters that were read, since the start
        self.num_failed = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._slots)

    # ---- holders ----

    def hold(self, digest: str) -> int | None:
        """Holds the slot of an adapter that is there, and returns its number. None: it is not there."""
        slot = self._of.get(digest)
        if slot is None or not slot.is_loaded:
            return None
        slot.num_holders += 1
        self._use(slot)
        return slot.number

    def release(self, number: int, last_step: int) -> None:
        """Ends one hold. Steps up to this number may still read the slot."""
        slot = self._slots[number]
        assert slot.num_holders > 0, f"slot {number} is released more often than it was held"
        slot.num_holders -= 1
        slot.last_step = max(slot.last_step, last_step)
        self._use(slot)

    def _use(self, slot: Slot) -> None:
        self._num_uses += 1
        slot.last_use = self._num_uses

    # ---- loads ----

    def has(self, digest: str) -> bool:
        """Whether an adapter is in a slot, or on its way into one."""
        return digest in self._of

    def load(self, adapter: Adapter) -> bool:
        """Begins to read an adapter into a slot: an empty one, or that of the adapter that was used longest ago. False:
        all are held, or steps in flight read them."""
        free = [slot for slot in self._slots if self._is_free(slot)]
        if not free:
            return False
        slot = min(free, key=lambda slot: (slot.adapter is not None, slot.last_use))
        if slot.adapter is not None:
            del self._of[slot.adapter.digest]
            self.num_evicted += 1
        slot.adapter, slot.is_loaded = adapter, False
        self._of[adapter.digest] = slot
        self._to_send.append(AdapterLoad(slot.number, adapter))
        return True

    @property
    def has_free(self) -> bool:
        """Whether another adapter could be loaded."""
        return any(map(self._is_free, self._slots))

    def _is_free(self, slot: Slot) -> bool:
        if slot.adapter is None:
            return True
        return slot.is_loaded and not slot.num_holders and slot.last_step <= self._last_done

    def is_loaded(self, digest: str) -> bool:
        slot = self._of.get(digest)
        return slot is not None and slot.is_loaded

    def in_use(self) -> list[str]:
        """The adapters that are there, those with the fewest holders first."""
        there = sorted(
            (slot for slot in self._slots if slot.is_loaded), key=lambda slot: (slot.num_holders, slot.last_use)
        )
        return [slot.adapter.digest for slot in there if slot.adapter is not None]

    def take_loads(self) -> list[AdapterLoad]:
        """What the next plan tells the workers to read."""
        loads, self._to_send = self._to_send, []
        return loads

    def send_again(self) -> None:
        """Steps failed or were skipped, and with them announcements and reports: the next plan announces all adapters
        that are not known to be there. Workers read none of them twice."""
        self._to_send = [
            AdapterLoad(slot.number, slot.adapter)
            for slot in self._slots
            if slot.adapter is not None and not slot.is_loaded
        ]

    @property
    def is_loading(self) -> bool:
        return any(slot.adapter is not None and not slot.is_loaded for slot in self._slots)

    def take_report(self, report: AdapterReport) -> tuple[list[str], Mapping[str, str]]:
        """What became of loads: the digests of adapters that are there now, and of those that failed, with the
        reason."""
        loaded: list[str] = []
        for number in report.loaded:
            slot = self._slots[number]
            if slot.adapter is not None and not slot.is_loaded:
                slot.is_loaded = True
                self._use(slot)
                self.num_loads += 1
                loaded.append(slot.adapter.digest)
        failed: dict[str, str] = {}
        for number, problem in report.failed.items():
            slot = self._slots[number]
            if slot.adapter is not None and not slot.is_loaded:
                failed[slot.adapter.digest] = problem
                del self._of[slot.adapter.digest]
                slot.adapter = None
                self.num_failed += 1
        return loaded, failed

    def step_done(self, step: int) -> None:
        self._last_done = max(self._last_done, step)

    # ---- figures and checks ----

    @property
    def num_loaded(self) -> int:
        return sum(slot.is_loaded for slot in self._slots)

    def holders(self) -> dict[str, int]:
        """How many requests hold each adapter."""
        return {slot.adapter.digest: slot.num_holders for slot in self._slots if slot.adapter and slot.num_holders}

    def number_of(self, digest: str) -> int:
        return self._of[digest].number

    def check(self, held: Mapping[int, int]) -> None:
        """Raise AssertionError unless slots and their holders agree. `held`: how many requests hold each slot."""
        for slot in self._slots:
            assert slot.num_holders == held.get(slot.number, 0), f"slot {slot.number}: miscounted holders"
            assert not slot.num_holders or slot.is_loaded, f"slot {slot.number} is held before it is loaded"
            assert not slot.is_loaded or slot.adapter is not None, f"slot {slot.number} has no adapter"
        named = {slot.adapter.digest: slot for slot in self._slots if slot.adapter is not None}
        assert named.keys() == self._of.keys(), "slots and digests differ"
        assert all(self._of[digest] is slot for digest, slot in named.items()), "an adapter is in two slots"
        assert held.keys() <= {slot.number for slot in self._slots}, "a slot is held that does not exist"
        for load in self._to_send:
            slot = self._slots[load.slot]
            assert slot.adapter == load.adapter and not slot.is_loaded, "a load is announced of another adapter"
