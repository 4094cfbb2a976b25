"""Moves blocks between the host tier and a KV connector, on threads beside the steps. A block that fails is the only
one that does.

Fetches and saves have a thread each, so that the connector gets one call of each kind at a time, and no step waits for
its storage. A load into the device whose block is still being fetched is held back until that has come; a slot that is
being saved is not written before that is done. Of several ranks, each has a part of a block: there a step waits for the
fetches that it begins, because what is there must be the same on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from ratoon.core.kv_connector import BlockMover
from ratoon.core.plan import BlockTransfer, ConnectorTransfer

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.05  # seconds that a step without other work waits for blocks


class HostSlots(Protocol):
    """The host tier, as far as it is used here."""

    def host_parts(self, slot: int) -> list[memoryview]: ...


@dataclass(slots=True)
class Arrived:
    """Fetches that have ended since this was last asked for."""

    loads: list[BlockTransfer] = field(default_factory=list)  # whose slots have their content now
    lost: list[BlockTransfer] = field(default_factory=list)  # whose slots have none
    num_fetched: int = 0
    seconds: float = 0.0


Fetched = tuple[set[int], float]  # slots whose content is not there, and the seconds that it took


class ConnectorMoves:
    def __init__(self, mover: BlockMover, slots: HostSlots, in_step: bool = False) -> None:
        """`in_step`: a step waits for its own fetches, so that several ranks report the same ones with it."""
        self._in_step = in_step
        self._mover = mover
        self._slots = slots
        self._fetcher = ThreadPoolExecutor(1, "kv-fetches")
        self._saver = ThreadPoolExecutor(1, "kv-saves")
        # Of each plan that has some, with the loads that wait for it
        self._fetching: list[tuple[Future[Fetched], list[BlockTransfer], int]] = []
        self._saving: dict[int, Future[None]] = {}  # by slot

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetching)

    # ---- fetch ----

    def fetch(self, fetches: Sequence[ConnectorTransfer], loads: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        """Begin to write blocks of the connector to their slots. Of these loads, returns those that need not wait for
        it."""
        self.settle(fetch.slot for fetch in fetches)
        slots = {fetch.slot for fetch in fetches}
        waiting = [load for load in loads if load.slot in slots]
        future = self._fetcher.submit(self._fetch, list(fetches), list(self._saving.values()))
        self._fetching.append((future, waiting, len(slots)))
        return [load for load in loads if load.slot not in slots]

    def _fetch(self, fetches: list[ConnectorTransfer], saves: list[Future[None]]) -> Fetched:
        wait(saves)  # what was saved before can be fetched
        began = time.perf_counter()
        found = self._mover.load_all([(fetch.key, self._slots.host_parts(fetch.slot)) for fetch in fetches])
        lost = {fetch.slot for fetch, is_there in zip(fetches, found, strict=True) if not is_there}
        return lost, time.perf_counter() - began

    def take_arrived(self, waits: bool = False) -> Arrived:
        """What has been fetched. `waits`: for a moment, until something has."""
        if self._in_step:
            wait([future for future, _, _ in self._fetching])
        if waits:
            wait([future for future, _, _ in self._fetching], IDLE_WAIT, FIRST_COMPLETED)
        ended = [one for one in self._fetching if one[0].done()]
        self._fetching = [one for one in self._fetching if one not in ended]
        arrived = Arrived()
        for future, loads, num_fetched in ended:
            try:
                lost, seconds = future.result()
            except Exception:  # of a connector that raises where it should say which blocks are not there
                logger.warning("%d blocks can't be loaded from the connector", num_fetched, exc_info=True)
                lost, seconds = {load.slot for load in loads}, 0.0
            arrived.loads += [load for load in loads if load.slot not in lost]
            arrived.lost += [load for load in loads if load.slot in lost]
            arrived.num_fetched += num_fetched
            arrived.seconds += seconds
        return arrived

    def drop_fetches(self) -> None:
        """A step failed: no load that waits for a fetch is made. Waits for those under way, which write to slots."""
        wait([future for future, _, _ in self._fetching])
        self._fetching = []

    # ---- save ----

    def save(self, saves: Sequence[ConnectorTransfer]) -> None:
        """Begin to hand blocks of slots, which are stored, to the connector."""
        for slot in [slot for slot, future in self._saving.items() if future.done()]:
            del self._saving[slot]
        future = self._saver.submit(self._save, list(saves))
        self._saving.update((save.slot, future) for save in saves)

    def _save(self, saves: list[ConnectorTransfer]) -> None:
        for save in saves:
            parts = [part.toreadonly() for part in self._slots.host_parts(save.slot)]
            # One after the other: a block that can't be kept is sent none the less
            for is_wanted, hand_over in ((save.is_sent, self._mover.send), (save.is_kept, self._mover.save)):
                try:
                    if is_wanted:
                        hand_over(save.key, parts)
                except Exception:
                    logger.warning("block %s can't be saved to the connector", save.key.hex(), exc_info=True)

    def settle(self, slots: Iterable[int]) -> None:
        """These slots are about to be written: waits until the connector has what is to be saved of them."""
        if self._saving:
            wait([self._saving[slot] for slot in slots if slot in self._saving])

    def drain(self) -> None:
        """Waits until no slot is read or written."""
        wait(list(self._saving.values()))
        wait([future for future, _, _ in self._fetching])

    def close(self) -> None:
        self._saver.shutdown()
        self._fetcher.shutdown()
