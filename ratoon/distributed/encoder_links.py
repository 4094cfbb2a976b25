"""Outputs of encoders that go from the engines that encode to engines on other hosts: rows of embeddings, by the key of
their input.

    engine that encodes     keeps what is saved in memory   ── ROUTER ┐
    engine that reads       fetches before its step         ── DEALER ┘ one for each engine that it fetches from

An output travels in pieces, so that a slow connection is told from a dead one, with a checksum over all of it. One that
does not come, is damaged or is not kept any more is encoded by the engine that reads. Connections are encrypted, and
both sides authenticate each other by the secret of the cluster (cluster.py). One thread owns the sockets. What is not
here: which engine has which output, which the client of the engines knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.futures import all_done
from ratoon.core.kv_connector import EncoderLink
from ratoon.core.prepared import prepared
from ratoon.distributed.block_bytes import fill
from ratoon.distributed.cluster import EncryptedContext, Mailbox, keys_of_secret
from ratoon.distributed.kv_boxes import checksum_of

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**20
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_SILENCE = 5.0  # after which an engine that was asked is gone
SECONDS_AFTER_SILENCE = 10.0  # in which it is not asked again
SECONDS_OF_A_FETCH = 20.0  # that a request waits for an output
SECONDS_OF_AN_IDLE_LINK = 30.0


# ---- messages ----


class Want(msgspec.Struct, tag=True):
    key: bytes
    fingerprint: str


class Piece(msgspec.Struct, tag=True):
    """A part of an output, whose bytes are in the next frame."""

    key: bytes
    start: int
    num_bytes: int  # of the whole output
    checksum: bytes  # of the whole output


class Lacking(msgspec.Struct, tag=True):
    """There is no such output, or what is here was made by another encoder."""

    key: bytes


Message = Want | Piece | Lacking
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(prepared(Message)).decode


# ---- what is kept ----


class Kept(NamedTuple):
    content: bytes | bytearray
    checksum: bytes


class KeptOutputs:
    """Outputs in memory; those that were not used for the longest time give way. Calls come from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Kept | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, kept: Kept) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
            self._num_bytes += len(kept.content) - (0 if before is None else len(before.content))
            self._kept[key] = kept
            while self._num_bytes > self.max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest.content)


# ---- what is on its way ----


@dataclass(slots=True)
class Fetch:
    """An output that was asked for."""

    key: bytes
    address: str
    since: float
    waiters: list[Future[None]] = field(default_factory=list)
    content: bytearray | None = None  # None: no piece has come
    num_come: int = 0  # bytes


@dataclass(slots=True)
class Link:
    """The connection to an engine that encodes."""

    socket: zmq.Socket[bytes]
    heard: float
    keys: set[bytes] = field(default_factory=set)  # that it was asked for and has not given


class EncoderExchange(EncoderLink):
    """The end of one engine. Methods of the base class are called from any thread."""

    def __init__(self, listen: str | None, secret: str, fingerprint: str, max_bytes: int) -> None:
        """`listen`: tcp://HOST:PORT, where an engine that encodes is reached; port 0 is any that is free. None: this
        engine encodes for no others. `max_bytes`: of what is kept, as what was made or as what was fetched."""
        self.kept = KeptOutputs(max_bytes)
        self.num_bad = 0  # outputs whose checksum did not agree
        self.address = ""
        self._fingerprint = fingerprint
        self._fetches: dict[bytes, Fetch] = {}
        self._links: dict[str, Link] = {}
        self._silent: dict[str, float] = {}  # addresses that are not asked, and until when
        self._lock = threading.Lock()  # of what is on its way
        self._mailbox = Mailbox()
        self._is_closed = False
        self._context = EncryptedContext(keys_of_secret(secret))
        self._router: zmq.Socket[bytes] | None = None
        if listen is not None:
            found = urlsplit(listen)
            try:
                self._router, self.address = self._context.listen(zmq.ROUTER, found.hostname or "", found.port or 0)
            except zmq.ZMQError as error:
                self._context.close()
                problem = f"outputs of encoders can't be fetched at {listen}: {error}"
                raise ConfigError("encode_engines", problem, "another address of this host") from None
        self._thread = threading.Thread(target=self._run, name="encoder-links", daemon=True)
        self._thread.start()

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        if self._router is not None:
            content = b"".join(parts)
            self.kept.put(key, Kept(content, checksum_of(key, content)))

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        found = self.kept.find(key)
        return found is not None and fill(parts, found.content)

    def fetch(self, wanted: Mapping[bytes, str]) -> Future[None]:
        waiters, now = list[Future[None]](), time.monotonic()
        with self._lock:
            for key, address in wanted.items():
                if self._is_closed or self.kept.find(key) is not None or self._silent.get(address, 0.0) > now:
                    continue
                fetch = self._fetches.get(key)
                if fetch is None:
                    fetch = self._fetches[key] = Fetch(key, address, now)
                    self._mailbox.put(fetch)
                waiters.append(Future())  # its own: a request that is aborted cancels it
                fetch.waiters.append(waiters[-1])
        if waiters:
            return all_done(waiters)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    # ---- the thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fileno, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        last_look = time.monotonic()
        while not self._is_closed:
            ready = dict(poller.poll(int(1000 * SECONDS_BETWEEN_LOOKS)))
            try:
                for fetch in self._mailbox.take_all():
                    if fetch is not None:
                        self._ask(fetch, poller)
                for link in list(self._links.values()):
                    if link.socket in ready:
                        self._hear(link)
                if self._router is not None and self._router in ready:
                    self._answer_all(self._router)
                now = time.monotonic()
                if now > last_look + SECONDS_BETWEEN_LOOKS:
                    last_look = now
                    self._look(now, poller)
            except zmq.ZMQError:
                if not self._is_closed:
                    logger.exception("a socket for outputs of encoders failed")
        self._context.close()
        self._mailbox.close()
        for fetch in list(self._fetches.values()):
            self._end(fetch)

    # ---- the thread, as the side that has encoded ----

    def _answer_all(self, router: zmq.Socket[bytes]) -> None:
        while True:
            try:
                identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _read(frames)
            if isinstance(message, Want):
                self._give(router, identity, message)

    def _give(self, router: zmq.Socket[bytes], identity: bytes, message: Want) -> None:
        found = self.kept.find(message.key) if message.fingerprint == self._fingerprint else None
        if found is None:
            router.send_multipart([identity, _encode(Lacking(message.key))])
            return
        content = memoryview(found.content)
        for start in range(0, len(content), PIECE_BYTES):
            head = Piece(message.key, start, len(content), found.checksum)
            router.send_multipart([identity, _encode(head), content[start : start + PIECE_BYTES]], copy=False)

    # ---- the thread, as the side that reads ----

    def _ask(self, fetch: Fetch, poller: zmq.Poller) -> None:
        link = self._links.get(fetch.address)
        if link is None:
            link = self._links[fetch.address] = Link(self._context.connect(zmq.DEALER, fetch.address), 0.0)
            poller.register(link.socket, zmq.POLLIN)
        if not link.keys:
            link.heard = time.monotonic()  # there was nothing to hear
        link.keys.add(fetch.key)
        link.socket.send(_encode(Want(fetch.key, self._fingerprint)))

    def _hear(self, link: Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            link.heard = time.monotonic()
            message = _read(frames)
            fetch = None if message is None else self._fetches.get(message.key)
            if fetch is None or message.key not in link.keys:
                continue  # it was given up
            if isinstance(message, Lacking):
                self._end(fetch, "it is not kept there any more")
            elif isinstance(message, Piece) and len(frames) == 2:
                self._take(fetch, message, frames[1])

    def _take(self, fetch: Fetch, message: Piece, piece: bytes) -> None:
        if fetch.content is None and 0 < message.num_bytes <= self.kept.max_bytes:
            fetch.content = bytearray(message.num_bytes)
        end = message.start + len(piece)
        if fetch.content is None or message.start != fetch.num_come or end > len(fetch.content) or not piece:
            self._end(fetch, "a piece of it is lost, or it is too large")
            return
        fetch.content[message.start : end] = piece
        fetch.num_come = end
        if end < len(fetch.content):
            return
        if checksum_of(fetch.key, fetch.content) == message.checksum:
            self.kept.put(fetch.key, Kept(fetch.content, message.checksum))
            self._end(fetch)
        else:
            self.num_bad += 1
            self._end(fetch, "it is damaged")

    def _end(self, fetch: Fetch, problem: str = "") -> None:
        """An output has come, or will not."""
        if problem:
            logger.warning("an image is encoded here, and not fetched from %s: %s", fetch.address, problem)
        with self._lock:
            del self._fetches[fetch.key]
        link = self._links.get(fetch.address)
        if link is not None:
            link.keys.discard(fetch.key)
        for waiter in fetch.waiters:
            with suppress(InvalidStateError):  # it was cancelled
                waiter.set_result(None)

    def _look(self, now: float, poller: zmq.Poller) -> None:
        for address, link in list(self._links.items()):
            is_silent = bool(link.keys) and now > link.heard + SECONDS_OF_SILENCE
            for fetch in [self._fetches[key] for key in link.keys]:
                if is_silent:
                    self._end(fetch, f"nothing has come from there for {SECONDS_OF_SILENCE:g} seconds")
                elif now > fetch.since + SECONDS_OF_A_FETCH:
                    self._end(fetch, f"it has not come within {SECONDS_OF_A_FETCH:g} seconds")
            if is_silent:
                with self._lock:
                    self._silent[address] = now + SECONDS_AFTER_SILENCE
            if is_silent or (not link.keys and now > link.heard + SECONDS_OF_AN_IDLE_LINK):
                poller.unregister(link.socket)
                link.socket.close(linger=0)
                del self._links[address]
        with self._lock:
            self._silent = {address: end for address, end in self._silent.items() if end > now}

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._mailbox.put(None)
            self._thread.join()


def _read(frames: Sequence[bytes]) -> Any:
    """The message of these frames; None for one that can't be read, which is ignored."""
    try:
        return _decode(frames[0])
    except (msgspec.MsgspecError, IndexError):
        logger.warning("a message about outputs of encoders was ignored: it can't be read")
        return None
