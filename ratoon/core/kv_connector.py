"""KV connectors: tiers of the block store that other packages register, behind host memory.

A connector has two halves, which may live in different processes. The scheduler's half decides: it is offered the
blocks that leave the device, and asked which it has. The worker's half moves bytes, between its own storage and blocks
in host memory; how these reach the device is the worker's. A block is named by a key, and means the same in every
engine whose fingerprint is equal. What a connector can't give back is computed: it loses nothing but time.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.futures import all_done
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_transfer import BETWEEN_ADDRESSES
from ratoon.core.plugins import KV_CONNECTORS, PluginError, find_plugin, plugin_names

logger = logging.getLogger(__name__)

BUILT_IN = {  # imported when they are asked for
    "files": "ratoon.distributed.kv_files:FilesConnector",
    "lmcache": "ratoon.distributed.lmcache:LMCacheConnector",
    "nixl": "ratoon.distributed.kv_nixl:NixlConnector",
    "peers": "ratoon.distributed.kv_peers:PeersConnector",
}


class BlockIndex(ABC):
    """The scheduler's half. It is asked while a step is planned, and answers at once: from memory, not from a disk that
    may be busy."""

    # Whether full blocks are offered as soon as a text ends, and not only when they leave the device
    keeps_ended_texts: bool = False
    looks_ahead: bool = False  # whether `look_ahead` does anything

    @abstractmethod
    def find(self, key: bytes) -> bool:
        """Whether the block of this key can be loaded now."""

    def look_ahead(self, keys: Sequence[bytes]) -> None:
        """These keys are about to be asked for, in this order, until one is not there. An index that has to ask a
        server may do so for several at once."""
        return

    @abstractmethod
    def offer(self, key: bytes) -> bool:
        """A full block leaves the device. True: it is to be saved."""

    def supersede(self, key: bytes) -> None:
        """Only superseded roots of a session need the block of this key, if it is there: it is the first to go."""
        return

    def prolong(self, key: bytes) -> None:
        """The block of this key is to be kept for 24 hours, if there is room for it."""
        return

    def keep(self, key: bytes, seconds: float) -> None:
        """A lease holds the block of this key for so many seconds, also over a restart of the engine: as long it is to
        be kept, if there is room for it, even where a later text of its session supersedes it."""
        return

    def lose(self, key: bytes) -> None:
        """The block of this key could not be loaded: it is not there any more."""
        return

    def close(self) -> None:
        """The engine ends."""
        return


class TransferIndex(BlockIndex):
    """The scheduler's half of a connector that moves blocks between engines that run. Blocks of one prompt are a
    transfer, which has a name. The engine that computes the prompt sends its blocks as they are computed; another one
    receives them, and finds them by their keys."""

    address: str  # where other engines reach this one

    @abstractmethod
    def begin_sending(self, name: str) -> None:
        """A request whose blocks are to be sent has come."""

    @abstractmethod
    def send(self, name: str, key: bytes) -> bool:
        """A block of this transfer is computed. True: its bytes are to be saved."""

    @abstractmethod
    def skip(self, name: str, key: bytes) -> None:
        """The bytes of a block of this transfer can't be saved."""

    @abstractmethod
    def end_sending(self, name: str) -> None:
        """All blocks of this transfer have been told of, or there will be no more."""

    @abstractmethod
    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        """Begins to receive the blocks of a transfer, but for those that are there already. What is returned is done
        when they have come, or will not come; a second call for the same name returns the same. `is_awaited`: a request
        waits for it, and not longer than some seconds. Raises ValueError for an address that this engine does not speak
        with."""


class BlockMover(ABC):
    """The worker's half. `parts` are the bytes of a block, one buffer after another; they are valid during the call
    alone. Calls come beside the steps, on three threads: one call to save at a time, one to send, and one to load. A
    call to save may take its time: blocks whose memory is needed meanwhile are not saved. What was saved before a load
    began can be loaded by it."""

    @abstractmethod
    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Keep these bytes. An exception is logged, and the block is not kept."""

    def send(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Keep these bytes for the transfers of a TransferIndex that have this block."""
        self.save(key, parts)

    @abstractmethod
    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Write the bytes of this block into `parts`. False, or an exception, which is logged: it is not there, or is
        damaged. What was written until then is not read."""

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        """Loads several blocks, in any order and by any threads. Returns for each what `load` does; nothing is raised,
        so that a block that fails is the only one that does."""
        return [self.load_or_log(key, parts) for key, parts in wanted]

    def load_or_log(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Calls `load`. An exception is logged, and is False."""
        try:
            return self.load(key, parts)
        except Exception:
            logger.warning("block %s can't be loaded from the connector", key.hex(), exc_info=True)
            return False

    def close(self) -> None:
        """The engine ends."""
        return


class EncoderLink(BlockMover):
    """Outputs of encoders between engines on different hosts. One that encodes keeps what is saved, and others fetch it
    from there; the latter save nothing, and load what they have fetched."""

    address: str  # where other engines fetch what is saved here. Empty: nowhere

    @abstractmethod
    def fetch(self, wanted: Mapping[bytes, str]) -> Future[None]:
        """Begins to fetch the items with these keys, but for those that are here, from the engines with these
        addresses. What is returned is done when they have come, or will not come."""


class IndexOfRanks(BlockIndex):
    """The indexes of all ranks of a model, each of which has its part of a block: a block can be loaded if all parts
    of it can be."""

    def __init__(self, indexes: Sequence[BlockIndex]) -> None:
        self._indexes = list(indexes)
        self.keeps_ended_texts = all(index.keeps_ended_texts for index in indexes)
        self.looks_ahead = any(index.looks_ahead for index in indexes)

    def find(self, key: bytes) -> bool:
        return all(index.find(key) for index in self._indexes)

    def look_ahead(self, keys: Sequence[bytes]) -> None:
        for index in self._indexes:
            index.look_ahead(keys)

    def offer(self, key: bytes) -> bool:
        """Every rank is offered its part. All of them save it if one does: a plan is the same for all."""
        answers = [index.offer(key) for index in self._indexes]
        return any(answers)

    def supersede(self, key: bytes) -> None:
        for index in self._indexes:
            index.supersede(key)

    def prolong(self, key: bytes) -> None:
        for index in self._indexes:
            index.prolong(key)

    def keep(self, key: bytes, seconds: float) -> None:
        for index in self._indexes:
            index.keep(key, seconds)

    def lose(self, key: bytes) -> None:
        for index in self._indexes:
            index.lose(key)

    def close(self) -> None:
        for index in self._indexes:
            index.close()


class TransferIndexOfRanks(IndexOfRanks, TransferIndex):
    """The index of all ranks for a connector that moves blocks between engines: each rank sends its parts to the same
    rank of the other engine, which must have as many. The address has the addresses of all."""

    def __init__(self, indexes: Sequence[TransferIndex]) -> None:
        super().__init__(indexes)
        self._transfers = list(indexes)
        self.address = BETWEEN_ADDRESSES.join(index.address for index in indexes)

    def begin_sending(self, name: str) -> None:
        for index in self._transfers:
            index.begin_sending(name)

    def send(self, name: str, key: bytes) -> bool:
        """All ranks save their part if one does: a plan is the same for all."""
        answers = [index.send(name, key) for index in self._transfers]
        return any(answers)

    def skip(self, name: str, key: bytes) -> None:
        for index in self._transfers:
            index.skip(name, key)

    def end_sending(self, name: str) -> None:
        for index in self._transfers:
            index.end_sending(name)

    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        addresses = verified_addresses(address, len(self._transfers))
        parts = zip(self._transfers, addresses, strict=True)
        return all_done([index.receive(name, one, is_there, is_awaited) for index, one in parts])


def verified_addresses(address: str, num_ranks: int) -> list[str]:
    """Returns the address of each rank of another engine. ValueError: it has more or fewer than this one."""
    addresses = address.split(BETWEEN_ADDRESSES)
    if len(addresses) != num_ranks:
        problem = f"its blocks are in the parts of {len(addresses)} ranks, those of this engine in {num_ranks}"
        raise ValueError(f"{address}: {problem}: both need the same tensor_parallel_size and pipeline_parallel_size")
    return addresses


class KVConnector(ABC):
    """What a package registers: a class, or a function, that makes one of these from `kv_connector_options`, and raises
    ValueError for options that it does not have. Both halves may be opened in one process."""

    @abstractmethod
    def open_index(self, fingerprint: KVFingerprint) -> BlockIndex: ...

    @abstractmethod
    def open_mover(self, fingerprint: KVFingerprint) -> BlockMover: ...

    def open_encoder_store(self, fingerprint: KVFingerprint) -> BlockMover | None:
        """Keeps what encoders of images make. Its items are not blocks: each has a size of its own, and it is asked for
        items that it may not have. None: this connector keeps blocks alone."""
        return None


def open_index(connector: KVConnector, fingerprints: Sequence[KVFingerprint]) -> BlockIndex:
    """The scheduler's half for an engine whose ranks have blocks of these kinds."""
    indexes = [connector.open_index(fingerprint) for fingerprint in fingerprints]
    if len(indexes) == 1:
        return indexes[0]
    transfers = [index for index in indexes if isinstance(index, TransferIndex)]
    return TransferIndexOfRanks(transfers) if len(transfers) == len(indexes) else IndexOfRanks(indexes)


def block_key(group: int, block_hash: bytes) -> bytes:
    """The name of a block: its KV group, and the hash of what it holds."""
    return group.to_bytes(2, "big") + block_hash


def open_connector(name: str, options: Mapping[str, Any]) -> KVConnector:
    """The connector of this name: one that is built in, or that a package registers. Raises ConfigError."""
    try:
        make = _built_in(name) or find_plugin(KV_CONNECTORS, name, callable, "class or function")
    except PluginError as error:
        raise ConfigError("kv_connector", f"{name!r} {error.problem}", "another version of it") from error
    if make is None:
        known = ", ".join([*BUILT_IN, *plugin_names(KV_CONNECTORS)])
        raise ConfigError("kv_connector", f"no package registers {name!r}", f"one of these: {known}")
    try:
        made = make(dict(options))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("kv_connector_options", f"{name} refuses {dict(options)!r}: {error}", "others") from error
    if not isinstance(made, KVConnector):
        raise ConfigError("kv_connector", f"{name!r} makes a {type(made).__name__}, not a KVConnector", "another one")
    return made


def _built_in(name: str) -> Callable[..., Any] | None:
    """A part of a room above this one, found by its name when the program runs."""
    if name not in BUILT_IN:
        return None
    module, _, attribute = BUILT_IN[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
