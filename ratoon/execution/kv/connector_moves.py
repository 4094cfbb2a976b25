"""Moves blocks between the host tier and a KV connector, on threads beside the steps. A block that fails is the only
one that does.

Fetches, sends and saves have a thread each, so that the connector gets one call of each kind at a time, and no step
waits for its storage. A load into the device whose block is still being fetched is held back until that has come. A
slot that is to be written while its block is being saved is written behind that; if its turn has not come, the block is
not saved: a connector may take blocks more slowly than texts end. Of several ranks, each has a part of a block: there a
step waits for the fetches that it begins, because what is there must be the same on all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from ratoon.core.kv_connector import BlockMover
from ratoon.core.plan import BlockTransfer, ConnectorTransfer

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.05  # seconds that a step without other work waits for blocks


class HostSlots(Protocol):
    """The host tier, as far as it is used here."""

    def host_parts(self, slots: Sequence[int]) -> list[list[memoryview]]:
        """The bytes of each of these slots, behind all copies to and from them."""


@dataclass(slots=True)
class Arrived:
    """Tells which loads may be made, and which cannot be, because their fetch has ended since `take_arrived` was called
    last."""

    loads: list[BlockTransfer] = field(default_factory=list)  # whose slots have their content now
    lost: list[BlockTransfer] = field(default_factory=list)  # whose slots have none
    num_fetched: int = 0  # blocks of the plans whose fetches have all ended, with the time that these took
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.loads or self.lost or self.num_fetched)


@dataclass(slots=True)
class PlannedFetch:
    """The blocks of a plan that come from the connector."""

    num_blocks: int
    num_pieces: int  # that have not ended
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Saving:
    """A block of a slot that is handed to the connector."""

    key: bytes
    future: Future[None]
    is_sent: bool  # another engine waits for it


SlotParts = list[list[memoryview]]
Fetched = tuple[set[int], float]  # slots whose content is not there, and the seconds that it took


class ConnectorMoves:
    def __init__(
        self, mover: BlockMover, slots: HostSlots, piece_size: int | None = None, in_step: bool = False
    ) -> None:
        """`piece_size`: blocks that are fetched together; None: all of a plan are. `in_step`: a step waits for its own
        fetches, so that several ranks report the same ones with it."""
        self._piece_size = piece_size
        self._in_step = in_step
        self._mover = mover
        self._slots = slots
        self._fetcher = ThreadPoolExecutor(1, "kv-fetches")
        self._saver = ThreadPoolExecutor(1, "kv-saves")
        self._sender = ThreadPoolExecutor(1, "kv-sends")  # no transfer waits for what is kept
        # In the order of plans, each with the loads that wait for it
        self._fetching: list[tuple[Future[Fetched], list[BlockTransfer], PlannedFetch]] = []
        self._saving: dict[int, list[Saving]] = {}  # by slot

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetching)

    # ---- fetch ----

    def fetch(self, fetches: Sequence[ConnectorTransfer], loads: Sequence[BlockTransfer]) -> list[BlockTransfer]:
        """Begin to write blocks of the connector to their slots. Of these loads, returns those that need not wait for
        it."""
        self.settle(fetch.slot for fetch in fetches)
        keys = {fetch.key for fetch in fetches}
        saves = [saving.future for savings in self._saving.values() for saving in savings if saving.key in keys]
        waiting: dict[int, list[BlockTransfer]] = {fetch.slot: [] for fetch in fetches}
        for load in loads:
            if load.slot in waiting:
                waiting[load.slot].append(load)
        size = self._piece_size or len(fetches)
        pieces = [list(fetches[first : first + size]) for first in range(0, len(fetches), size)]
        planned = PlannedFetch(len(fetches), len(pieces))
        # Once for all pieces: they do not wait for the copies that the loads of earlier ones begin
        parts = self._fetcher.submit(self._slots.host_parts, [fetch.slot for fetch in fetches])
        for first, piece in zip(range(0, len(fetches), size), pieces):
            future = self._fetcher.submit(self._fetch, piece, parts, first, saves)
            self._fetching.append((future, [load for fetch in piece for load in waiting[fetch.slot]], planned))
        return [load for load in loads if load.slot not in waiting]

    def _fetch(
        self, fetches: list[ConnectorTransfer], parts: Future[SlotParts], first: int, saves: list[Future[None]]
    ) -> Fetched:
        """`parts`: of the plan's slots, of which those of these fetches begin with `first`."""
        wait(saves)  # what was saved before can be fetched
        began = time.perf_counter()
        asked = zip(fetches, parts.result()[first : first + len(fetches)], strict=True)
        found = self._mover.load_all([(fetch.key, of_slot) for fetch, of_slot in asked])
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
        for future, loads, planned in ended:
            try:
                lost, seconds = future.result()
            except Exception:  # of a connector that raises where it should say which blocks are not there
                logger.warning("%d blocks can't be loaded from the connector", len(loads), exc_info=True)
                lost, seconds = {load.slot for load in loads}, 0.0
            arrived.loads += [load for load in loads if load.slot not in lost]
            arrived.lost += [load for load in loads if load.slot in lost]
            planned.seconds += seconds
            planned.num_pieces -= 1
            if not planned.num_pieces:
                arrived.num_fetched += planned.num_blocks
                arrived.seconds += planned.seconds
        return arrived

    def drop_fetches(self) -> None:
        """A step failed: no load that waits for a fetch is made. Waits for those under way, which write to slots."""
        wait([future for future, _, _ in self._fetching])
        self._fetching = []

    # ---- save ----

    def save(self, saves: Sequence[ConnectorTransfer]) -> None:
        """Begin to hand blocks of slots, which are stored, to the connector, in this order."""
        for slot in [slot for slot, savings in self._saving.items() if all(one.future.done() for one in savings)]:
            del self._saving[slot]
        for save in saves:
            savings = self._saving.setdefault(save.slot, [])
            if save.is_sent:
                savings.append(Saving(save.key, self._sender.submit(self._hand_over, self._mover.send, save), True))
            if save.is_kept:
                savings.append(Saving(save.key, self._saver.submit(self._hand_over, self._mover.save, save), False))

    def _hand_over(self, give: Callable[[bytes, Sequence[memoryview]], None], save: ConnectorTransfer) -> None:
        try:
            give(save.key, [part.toreadonly() for part in self._slots.host_parts([save.slot])[0]])
        except Exception:
            logger.warning("block %s can't be saved to the connector", save.key.hex(), exc_info=True)

    def settle(self, slots: Iterable[int]) -> None:
        """These slots are about to be written. Their blocks that the connector has not begun to save are given up; for
        one that it is saving, and for those that are sent, this waits."""
        if self._saving:
            savings = [saving for slot in slots for saving in self._saving.pop(slot, ())]
            wait([saving.future for saving in savings if saving.is_sent or not saving.future.cancel()])

    def drain(self) -> None:
        """Waits until no slot is read or written."""
        wait([saving.future for savings in self._saving.values() for saving in savings])
        wait([future for future, _, _ in self._fetching])

    def close(self) -> None:
        self._sender.shutdown()
        self._saver.shutdown()
        self._fetcher.shutdown()
