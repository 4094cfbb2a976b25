"""Moves blocks between the host tier and a KV connector. A block that fails is the only one that does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ratoon.core.kv_connector import BlockMover
from ratoon.core.plan import ConnectorTransfer

logger = logging.getLogger(__name__)


class HostSlots(Protocol):
    """The host tier, as far as it is used here."""

    def host_parts(self, slot: int) -> list[memoryview]: ...


class ConnectorMoves:
    def __init__(self, mover: BlockMover, slots: HostSlots) -> None:
        self._mover = mover
        self._slots = slots

    def fetch(self, fetches: Sequence[ConnectorTransfer]) -> list[int]:
        """Write blocks of the connector to their slots. Returns the slots whose content is not there."""
        found = self._mover.load_all([(fetch.key, self._slots.host_parts(fetch.slot)) for fetch in fetches])
        return [fetch.slot for fetch, is_there in zip(fetches, found, strict=True) if not is_there]

    def save(self, saves: Sequence[ConnectorTransfer]) -> None:
        """Hand blocks of slots, which are stored, to the connector."""
        for save in saves:
            try:
                self._mover.save(save.key, [part.toreadonly() for part in self._slots.host_parts(save.slot)])
            except Exception:
                logger.warning("block %s can't be saved to the connector", save.key.hex(), exc_info=True)
