"""The connector `peers`: blocks of the KV cache go from the engine that computes a prompt to the one that goes on with
it, while the prompt is computed. Options, and the two halves of the connector over one exchange (kv_exchange.py). Of
several ranks each has an exchange, in the engine's process, which the process of the rank reaches by a socket
(kv_links.py)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ratoon.core.errors import ConfigError
from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockMover, KVConnector, TransferIndex, verified_addresses
from ratoon.core.kv_transfer import ANY_PEER
from ratoon.core.sizes import parse_size
from ratoon.distributed.block_bytes import fill
from ratoon.distributed.cluster import EXPECTED_SECRET, LEAST_SECRET, SECRET_VARIABLE
from ratoon.distributed.encoder_links import EncoderExchange
from ratoon.distributed.kv_exchange import TCP, PeerExchange
from ratoon.distributed.kv_links import LinkedMover, RankLink, address_of

DEFAULT_BYTES = 2**30  # of the outbox, and of the inbox
OPTIONS = ("folder", "listen", "max_bytes", "peers", "secret_file")
RANK_FOLDER = "rank_folder"  # of an engine with several ranks, which adds it to its options
# Added by an engine whose outputs of encoders go between hosts: whether it encodes for others, or fetches from those
ENCODES = "encodes"

# Exchanges whose worker's half is open, and whose other half is not yet. Both are opened by one engine, one after the
# other.
_half_open: dict[tuple[str, str], deque[PeerExchange]] = {}


class PeersConnector(KVConnector):
    exchange_class: type[PeerExchange] = PeerExchange

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {*OPTIONS, RANK_FOLDER, ENCODES})
        folder, listen = options.get("folder"), options.get("listen")
        peers = options.get("peers", [])
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is unknown; there are {', '.join(OPTIONS)}")
        if (folder is None) == (listen is None):
            raise ValueError(
                'either {"folder": PATH} is needed, for engines of this host, or {"listen": "tcp://HOST:PORT"}'
            )
        address = folder if listen is None else listen
        if not isinstance(address, str) or not address:
            raise ValueError(f"{address!r} is no address")
        if listen is not None and (not listen.startswith(TCP) or not urlsplit(listen).hostname):
            raise ValueError(f'"listen" is {listen!r}; it has the form tcp://HOST:PORT')
        if not isinstance(peers, list) or not all(
            isinstance(one, str) and (one.startswith(TCP) or one == ANY_PEER) for one in peers
        ):
            raise ValueError(f'"peers" is a list of addresses of the form tcp://HOST:PORT, or of "{ANY_PEER}"')
        try:
            self._max_bytes = parse_size("max_bytes", options.get("max_bytes", DEFAULT_BYTES))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        self._address = address
        self._peers = peers
        self._secret = None if listen is None else _read_secret(options.get("secret_file"))
        self._name = repr(sorted(options.items()))
        self._rank_folder: str | None = options.get(RANK_FOLDER)
        self._encodes: bool | None = options.get(ENCODES)
        self._num_ranks = 0  # whose index was opened, in the order of ranks

    def open_mover(self, fingerprint: KVFingerprint) -> BlockMover:
        if self._rank_folder is not None:
            return LinkedMover(address_of(self._rank_folder, fingerprint))
        made = self._make_exchange(fingerprint, 0)
        _half_open.setdefault((self._name, fingerprint.digest), deque()).append(made)
        return PeersMover(made)

    def open_encoder_store(self, fingerprint: KVFingerprint) -> EncoderExchange | None:
        if self._encodes is None or self._secret is None:
            return None
        listen = self._address if self._encodes else None
        return EncoderExchange(listen, self._secret, fingerprint.digest, self._max_bytes)

    def _make_exchange(self, fingerprint: KVFingerprint, rank: int) -> PeerExchange:
        num_bytes = sum(fingerprint.layout.tensor_bytes)
        peers = [_of_rank(peer, rank) for peer in self._peers]
        return self.exchange_class(
            _of_rank(self._address, rank), self._secret, num_bytes, self._max_bytes, fingerprint.digest, peers
        )

    def open_index(self, fingerprint: KVFingerprint) -> PeersIndex:
        if self._rank_folder is not None:
            made = self._make_exchange(fingerprint, self._num_ranks)
            self._num_ranks += 1
            return PeersIndex(made, RankLink(made, address_of(self._rank_folder, fingerprint)))
        waiting = _half_open.get((self._name, fingerprint.digest))
        if not waiting:
            problem = "the connector has both halves in one process, and the worker is in another one"
            raise ConfigError("executor", problem, "uniproc, with this kv_connector")
        return PeersIndex(waiting.popleft())


def _of_rank(address: str, rank: int) -> str:
    """The address of a rank, by that of the first: its port is higher. Ranks of one host share a folder."""
    head, colon, port = address.rpartition(":")
    if not rank or not address.startswith(TCP) or not port.isdecimal() or port == "0":
        return address
    return f"{head}{colon}{int(port) + rank}"


def _read_secret(file: Any) -> str:
    if file is None:
        secret = os.environ.get(SECRET_VARIABLE, "").strip()
    else:
        try:
            secret = Path(file).read_text().strip()
        except (OSError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f'"secret_file" can\'t be read: {error}') from None
    if len(secret) < LEAST_SECRET:
        raise ValueError(
            f"engines on several hosts authenticate each other by a secret: set {SECRET_VARIABLE}, or "
            f'"secret_file": {EXPECTED_SECRET}'
        )
    return secret


class PeersIndex(TransferIndex):
    def __init__(self, exchange: PeerExchange, link: RankLink | None = None) -> None:
        self.exchange = exchange
        self.address = exchange.address
        self._link = link

    def find(self, key: bytes) -> bool:
        return key in self.exchange.inbox

    def offer(self, key: bytes) -> bool:
        return False  # blocks that leave the device are of no use to others

    def lose(self, key: bytes) -> None:
        self.exchange.inbox.take(key)

    def begin_sending(self, name: str) -> None:
        self.exchange.begin_sending(name)

    def send(self, name: str, key: bytes) -> bool:
        return self.exchange.send(name, key)

    def skip(self, name: str, key: bytes) -> None:
        self.exchange.skip(name, key)

    def end_sending(self, name: str) -> None:
        self.exchange.end_sending(name)

    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        (address,) = verified_addresses(address, 1)
        return self.exchange.receive(name, address, is_there, is_awaited)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self.exchange.close()


class PeersMover(BlockMover):
    def __init__(self, exchange: PeerExchange) -> None:
        self._exchange = exchange

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self._exchange.save(key, parts)

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        content = self._exchange.inbox.take(key)
        return content is not None and fill(parts, content)

    def close(self) -> None:
        self._exchange.close()
