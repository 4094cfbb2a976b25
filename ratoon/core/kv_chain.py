"""Two connectors as one: the first moves blocks between engines that run, the second keeps them (kv_connector.py).

Blocks that leave the device are offered to the second alone, and those of a transfer are sent by the first alone: what
a request asks to keep in memory may travel, and is not written. A block is looked for in the first, which has what has
just come from another engine, and then in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockIndex, BlockMover, KVConnector, TransferIndex, open_connector


class ChainedIndex(TransferIndex):
    def __init__(self, transfers: TransferIndex, kept: BlockIndex) -> None:
        self._transfers = transfers
        self._kept = kept
        self.address = transfers.address
        self.keeps_ended_texts = kept.keeps_ended_texts
        self.looks_ahead = kept.looks_ahead

    def find(self, key: bytes) -> bool:
        return self._transfers.find(key) or self._kept.find(key)

    def look_ahead(self, keys: Sequence[bytes]) -> None:
        self._kept.look_ahead(keys)

    def offer(self, key: bytes) -> bool:
        return self._kept.offer(key)

    def supersede(self, key: bytes) -> None:
        self._kept.supersede(key)

    def prolong(self, key: bytes) -> None:
        self._kept.prolong(key)

    def keep(self, key: bytes, seconds: float) -> None:
        self._kept.keep(key, seconds)

    def lose(self, key: bytes) -> None:
        self._transfers.lose(key)
        self._kept.lose(key)

    def begin_sending(self, name: str) -> None:
        self._transfers.begin_sending(name)

    def send(self, name: str, key: bytes) -> bool:
        return self._transfers.send(name, key)

    def skip(self, name: str, key: bytes) -> None:
        self._transfers.skip(name, key)

    def end_sending(self, name: str) -> None:
        self._transfers.end_sending(name)

    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        return self._transfers.receive(name, address, is_there, is_awaited)

    def close(self) -> None:
        self._transfers.close()
        self._kept.close()


class ChainedMover(BlockMover):
    def __init__(self, transfers: BlockMover, kept: BlockMover) -> None:
        self._transfers = transfers
        self._kept = kept

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self._kept.save(key, parts)

    def send(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self._transfers.send(key, parts)

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        return self._transfers.load_or_log(key, parts) or self._kept.load(key, parts)

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        found = self._transfers.load_all(wanted)
        left = [one for one, is_there in zip(wanted, found, strict=True) if not is_there]
        rest = iter(self._kept.load_all(left) if left else ())
        return [is_there or next(rest) for is_there in found]

    def close(self) -> None:
        self._transfers.close()
        self._kept.close()


class ChainedConnector(KVConnector):
    def __init__(self, transfers: KVConnector, kept: KVConnector) -> None:
        self._transfers = transfers
        self._kept = kept

    def open_index(self, fingerprint: KVFingerprint) -> ChainedIndex:
        transfers = self._transfers.open_index(fingerprint)
        if not isinstance(transfers, TransferIndex):
            problem = "the first of two connectors moves no blocks between engines"
            raise ConfigError("kv_connector", problem, "peers or nixl")
        return ChainedIndex(transfers, self._kept.open_index(fingerprint))

    def open_mover(self, fingerprint: KVFingerprint) -> ChainedMover:
        return ChainedMover(self._transfers.open_mover(fingerprint), self._kept.open_mover(fingerprint))

    def open_encoder_store(self, fingerprint: KVFingerprint) -> BlockMover | None:
        return self._kept.open_encoder_store(fingerprint)


def open_connectors(named: Sequence[tuple[str, Mapping[str, Any]]]) -> KVConnector:
    """Returns the connector of this name and these options; of two, both as one. Raises ConfigError."""
    first, *others = (open_connector(name, options) for name, options in named)
    if not others:
        return first
    (behind,) = others
    return ChainedConnector(first, behind)
