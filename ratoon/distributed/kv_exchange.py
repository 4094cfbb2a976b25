"""The exchange of blocks between engines, behind the connector `peers` (kv_peers.py): what is sent, what is received,
and the thread between them.

    engine that sends       outbox: the blocks of its transfers  ── ROUTER ┐
    engine that receives    inbox: blocks that are to be loaded  ── DEALER ┘ one for each engine that it receives from

The receiver subscribes to a transfer by its name and is told the keys of blocks as they are computed. It copies those
that it lacks: within a host from the sender's outbox, which it maps; from another host it asks for them. A block whose
checksum does not agree is dropped, and computed by the receiver, as is every block that does not come.

A block stays in the outbox until the receiver has it. A receiver is there as long as its beats come: each side sends
them on every connection, and what is kept for a silent receiver is dropped after some seconds, as is what no receiver
has asked for. So neither side waits for one that has died or hangs.

Within a host, sockets are files of a private folder. Between hosts they are encrypted, and both sides authenticate
each other by the secret of the cluster (cluster.py). One thread owns the sockets.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from ratoon.core.errors import ConfigError
from ratoon.core.kv_transfer import ANY_PEER
from ratoon.core.prepared import prepared
from ratoon.core.private_folders import make_missing_folders
from ratoon.distributed.cluster import EncryptedContext, Mailbox, keys_of_secret
from ratoon.distributed.kv_boxes import Inbox, MappedOutbox, Outbox, checksum_of

logger = logging.getLogger(__name__)

IPC = "ipc://"
TCP = "tcp://"
SECONDS_BETWEEN_BEATS = 0.5
SECONDS_OF_SILENCE = 5.0  # after which the other side is gone
SECONDS_WITHOUT_RECEIVER = 30.0  # that blocks are kept for one that has not subscribed yet
SECONDS_TO_BEGIN = 600.0  # for the request of a transfer that a receiver has subscribed to: a step may be long
SECONDS_FOR_LAST_BLOCKS = 2.0  # from the end of a request until its last blocks are saved
SECONDS_OF_A_TRANSFER = 20.0  # that a request waits for its blocks once it has come
SECONDS_OF_AN_IDLE_LINK = 30.0
OF_ANOTHER_KIND = "the other engine has another model, or settings with which keys and values differ"
MAX_OVER = 4096  # names of transfers that are remembered once they are over


# ---- messages ----


class Subscribe(msgspec.Struct, tag=True):
    name: str
    fingerprint: str


class Alive(msgspec.Struct, tag=True):
    """A beat. From the sender: how many blocks of each of the receiver's transfers it has told of."""

    told: dict[str, int] = {}


class Taken(msgspec.Struct, tag=True):
    """The receiver has these blocks, or does not need them."""

    name: str
    keys: list[bytes]


class Want(msgspec.Struct, tag=True):
    """From another host: the content of these blocks is asked for."""

    name: str
    keys: list[bytes]


class Welcome(msgspec.Struct, tag=True):
    outbox: str  # where it can be mapped on this host
    agent: bytes = b""  # how another library reaches it (kv_nixl.py): its own description,
    memory: int = 0  # and the address of the first slot in the sender's process


class Blocks(msgspec.Struct, tag=True):
    """Blocks that are computed: key, checksum, slot of the outbox."""

    name: str
    entries: list[tuple[bytes, bytes, int]]


class Content(msgspec.Struct, tag=True):
    """The content of a block is in the next frame; nothing: it is not there any more."""

    name: str
    key: bytes
    checksum: bytes


class Done(msgspec.Struct, tag=True):
    """All blocks of this transfer have been told of."""

    name: str


class Gone(msgspec.Struct, tag=True):
    """There is no such transfer, or it is over; or the receiver's blocks are of another kind than the sender's."""

    name: str
    is_of_another_kind: bool = False


Message = Subscribe | Alive | Taken | Want | Welcome | Blocks | Content | Done | Gone
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(prepared(Message)).decode


# ---- the two sides of a transfer ----


@dataclass(slots=True)
class Sending:
    """A transfer whose blocks are computed here."""

    name: str
    since: float
    has_begun: bool = False
    is_kept: dict[bytes, bool] = field(default_factory=dict)  # by key: whether its content is in the outbox
    ready: list[bytes] = field(default_factory=list)  # those that are, in their order
    ended: float | None = None  # when there were no more
    receiver: bytes | None = None
    seen: float = 0.0  # when the receiver was last heard
    num_told: int = 0  # of those that are ready
    is_done: bool = False  # the receiver was told that there are no more
    untaken: set[bytes] = field(default_factory=set)

    def is_complete(self, now: float) -> bool:
        """Whether all blocks have been told of. Some may not be saved at all, for example without room."""
        if self.ended is None or self.num_told < len(self.ready):
            return False
        return all(self.is_kept.values()) or now > self.ended + SECONDS_FOR_LAST_BLOCKS

    def problem(self, now: float) -> str:
        """Why it is over before its receiver has all. Empty: it is not."""
        if not self.has_begun:
            return "its request has not come" if now > self.since + SECONDS_TO_BEGIN else ""
        if self.receiver is None:
            is_late = self.ended is not None and now > self.ended + SECONDS_WITHOUT_RECEIVER
            return "no engine has asked for its blocks" if is_late else ""
        return "the engine that receives is silent" if now > self.seen + SECONDS_OF_SILENCE else ""


@dataclass(slots=True)
class Receiving:
    """A transfer whose blocks are computed elsewhere."""

    name: str
    address: str
    is_there: Callable[[bytes], bool]
    done: Future[None]
    awaited_since: float | None = None  # when a request came that waits for it
    num_heard: int = 0  # blocks that were told of
    wanted: set[bytes] = field(default_factory=set)  # whose content was asked for
    is_complete: bool = False  # there are no more
    is_behind: bool = False  # a beat told of more blocks than have come


@dataclass(slots=True)
class Link:
    """The connection to an engine that sends."""

    socket: zmq.Socket[bytes]
    heard: float
    used: float
    outbox: MappedOutbox | None = None
    agent: Any = None  # of another library, that reads the outbox
    memory: int = 0


class PeerExchange:
    """The end of one engine in all its transfers. Methods are called from any thread."""

    def __init__(
        self,
        address: str,
        secret: str | None,
        block_bytes: int,
        max_bytes: int,
        fingerprint: str,
        peers: list[str],
    ) -> None:
        """`address`: a folder for a socket, or tcp://HOST:PORT, where port 0 is any that is free. `secret`: of those on
        other hosts. `peers`: the addresses there from which blocks may be fetched."""
        self.outbox = Outbox(block_bytes, max_bytes)
        self.inbox = Inbox(max_bytes)
        self.num_bad_blocks = 0  # whose checksum did not agree
        self._fingerprint = fingerprint
        self._peers = set(peers)
        self._sending: dict[str, Sending] = {}
        self._receiving: dict[str, Receiving] = {}
        self._over: OrderedDict[str, None] = OrderedDict()  # transfers that were sent
        self._received: OrderedDict[str, None] = OrderedDict()
        self._links: dict[str, Link] = {}
        self._lock = threading.RLock()  # of what is sent
        self._receiving_lock = threading.Lock()  # never held while blocks are copied: the engine's steps would wait
        self._mailbox = Mailbox()
        self._is_closed = False
        self._encrypted: EncryptedContext | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        if address.startswith(TCP):
            self._open_network(address, secret)
        else:
            self._open_folder(Path(address))
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    def _open_network(self, address: str, secret: str | None) -> None:
        assert secret is not None
        self._encrypted = EncryptedContext(keys_of_secret(secret))
        found = urlsplit(address)
        try:
            self._router, self.address = self._encrypted.listen(zmq.ROUTER, found.hostname or "", found.port or 0)
        except zmq.ZMQError as error:
            self._encrypted.close()
            raise ConfigError(
                "kv_connector_options", f"no socket can be made at {address}: {error}", "another one"
            ) from None

    def _open_folder(self, folder: Path) -> None:
        make_missing_folders(folder)
        self._folder = folder
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = self._router.rcvhwm = 0
        self.address = f"{IPC}{folder}/kv-{secrets.token_hex(4)}"
        self._router.bind(self.address)

    # ---- the side that sends ----

    def begin_sending(self, name: str) -> None:
        with self._lock:
            found = self._sending.get(name)
            if found is None:
                found = self._sending[name] = Sending(name, time.monotonic())
            found.has_begun = True

    def send(self, name: str, key: bytes) -> bool:
        with self._lock:
            found = self._sending.get(name)
            if found is None or key in found.is_kept:
                return False
            self.outbox.use(key, name)
            found.untaken.add(key)
            is_kept = found.is_kept[key] = self.outbox.find(key) is not None
            if is_kept:
                found.ready.append(key)
                self._mailbox.put(None)
            return not is_kept

    def skip(self, name: str, key: bytes) -> None:
        with self._lock:
            found = self._sending.get(name)
            if found is not None:
                found.is_kept[key] = True
                found.untaken.discard(key)

    def end_sending(self, name: str) -> None:
        with self._lock:
            found = self._sending.get(name)
            if found is not None and found.ended is None:
                found.ended = time.monotonic()
                self._mailbox.put(None)

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        is_kept = self.outbox.keep(key, parts)
        with self._lock:
            for sending in self._sending.values():
                if sending.is_kept.get(key) is False:
                    sending.is_kept[key] = True
                    if is_kept:
                        sending.ready.append(key)
                    else:
                        sending.untaken.discard(key)
        self._mailbox.put(None)

    # ---- the side that receives ----

    def receive(
        self, name: str, address: str, is_there: Callable[[bytes], bool], is_awaited: bool = True
    ) -> Future[None]:
        self._verify(address)
        with self._receiving_lock:
            if name in self._received:
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            known = self._receiving.get(name)
            receiving = known or Receiving(name, address, is_there, Future())
            if is_awaited and receiving.awaited_since is None:
                receiving.awaited_since = time.monotonic()
            self._receiving[name] = receiving
        if known is None:
            self._mailbox.put(receiving)
        return receiving.done

    def _verify(self, address: str) -> None:
        if address == self.address:
            raise ValueError(f"{address} is this engine itself")
        if self._encrypted is not None:
            if address not in self._peers and (ANY_PEER not in self._peers or not address.startswith(TCP)):
                known = ", ".join(sorted(self._peers)) or "none"
                raise ValueError(f"{address} is none of the engines that this one receives from ({known})")
        elif not address.startswith(f"{IPC}{self._folder}/kv-") or "/" in address[len(f"{IPC}{self._folder}/") :]:
            raise ValueError(f"{address} is no socket in the folder of this engine")

    # ---- the thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fileno, zmq.POLLIN)
        last_beat = 0.0
        while not self._is_closed:
            for link in self._links.values():
                poller.register(link.socket, zmq.POLLIN)
            ready = dict(poller.poll(int(1000 * SECONDS_BETWEEN_BEATS)))
            try:
                for made in self._mailbox.take_all():
                    if made is not None:
                        self._subscribe(made)
                for address, link in list(self._links.items()):
                    if link.socket in ready:
                        self._take(link.socket, address)
                now = time.monotonic()
                with self._lock:
                    self._take(self._router, None)
                    for sending in list(self._sending.values()):
                        self._tell(sending, now)
                if now > last_beat + SECONDS_BETWEEN_BEATS:
                    last_beat = now
                    self._beat(now, poller)
            except zmq.ZMQError:
                if not self._is_closed:
                    logger.exception("a socket of the KV transfers failed")
        self._close_sockets()

    def _take(self, socket: zmq.Socket[bytes], address: str | None) -> None:
        """Takes all messages of a socket. `address`: of the sender that it is connected to; None: receivers write."""
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            identity = frames.pop(0) if address is None else b""
            try:
                message = _decode(frames[0])
            except (msgspec.MsgspecError, IndexError):
                logger.warning("a message of another engine was ignored: it can't be read")
                continue
            if address is None:
                self._answer(identity, message)
            else:
                self._hear(self._links[address], message, frames[1:])

    def _send(self, socket: zmq.Socket[bytes], message: Message) -> None:
        with suppress(zmq.ZMQError):  # the other side is gone
            socket.send(_encode(message), zmq.NOBLOCK)

    def _reply(self, identity: bytes, message: Message, *content: Any) -> None:
        with suppress(zmq.ZMQError):
            self._router.send_multipart([identity, _encode(message), *content], zmq.NOBLOCK)

    # ---- the thread, as the side that sends ----

    def _answer(self, identity: bytes, message: Any) -> None:
        now = time.monotonic()
        if isinstance(message, Subscribe):
            if message.fingerprint != self._fingerprint:
                logger.warning("the KV transfer %s is refused: %s", message.name, OF_ANOTHER_KIND)
                self._reply(identity, Gone(message.name, is_of_another_kind=True))
                return
            if message.name in self._over:
                self._reply(identity, Gone(message.name))
                return
            sending = self._sending.setdefault(message.name, Sending(message.name, now))
            sending.receiver, sending.seen, sending.num_told, sending.is_done = identity, now, 0, False
            self._reply(identity, self._welcome())
            self._tell(sending, now)
        elif isinstance(message, Alive):
            told = {}
            for sending in self._sending.values():
                if sending.receiver == identity:
                    sending.seen = now
                    told[sending.name] = sending.num_told
            self._reply(identity, Alive(told))
        elif isinstance(message, Taken):
            self._taken(message)
        elif isinstance(message, Want):
            self._give(identity, message)

    def _welcome(self) -> Welcome:
        return Welcome("" if self._encrypted is not None else self.outbox.path)

    def _tell(self, sending: Sending, now: float) -> None:
        """Tells the receiver of the blocks that are ready, and when there are no more."""
        problem = sending.problem(now)
        if problem:
            logger.info("the KV transfer %s is over: %s", sending.name, problem)
            self._drop(sending)
            return
        if sending.receiver is None:
            return
        if new := sending.ready[sending.num_told :]:
            found = [(key, self.outbox.find(key)) for key in new]
            entries = [(key, kept.checksum, kept.slot) for key, kept in found if kept is not None]
            sending.num_told += len(new)
            self._reply(sending.receiver, Blocks(sending.name, entries))
        if not sending.is_done and sending.is_complete(now):
            sending.is_done = True
            self._reply(sending.receiver, Done(sending.name))
        if sending.is_done and not sending.untaken.intersection(sending.ready):
            self._drop(sending, tells=False)

    def _taken(self, message: Taken) -> None:
        sending = self._sending.get(message.name)
        if sending is not None:
            for key in message.keys:
                sending.untaken.discard(key)
                self.outbox.release(key, message.name)

    def _give(self, identity: bytes, message: Want) -> None:
        for key in message.keys:
            kept = self.outbox.find(key) if message.name in self._sending else None
            if kept is None:
                self._reply(identity, Content(message.name, key, b""), b"")
            else:
                self._reply(identity, Content(message.name, key, kept.checksum), self.outbox.view(kept.slot))

    def _drop(self, sending: Sending, tells: bool = True) -> None:
        del self._sending[sending.name]
        self._over[sending.name] = None
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)
        for key in sending.is_kept:
            self.outbox.release(key, sending.name)
        if tells and sending.receiver is not None:
            self._reply(sending.receiver, Gone(sending.name))

    # ---- the thread, as the side that receives ----

    def _subscribe(self, receiving: Receiving) -> None:
        now = time.monotonic()
        link = self._links.get(receiving.address)
        if link is None:
            link = self._links[receiving.address] = Link(self._connect(receiving.address), now, now)
        if not self._of_link(receiving.address, but=receiving):
            link.heard = now  # there was nothing to hear
        link.used = now
        self._send(link.socket, Subscribe(receiving.name, self._fingerprint))

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        if self._encrypted is not None:
            made = self._encrypted.connect(zmq.DEALER, address)
        else:
            assert self._context is not None
            made = self._context.socket(zmq.DEALER)
            made.linger = 0
            made.sndhwm = made.rcvhwm = 0
            made.connect(address)
        return made

    def _hear(self, link: Link, message: Any, content: list[bytes]) -> None:
        link.heard = time.monotonic()
        if isinstance(message, Welcome):
            self._greet(link, message)
            return
        if isinstance(message, Alive):
            self._compare(message.told)
            return
        receiving = self._receiving.get(message.name)
        if receiving is None:
            return
        if isinstance(message, Blocks):
            self._take_blocks(link, receiving, message)
        elif isinstance(message, Content):
            receiving.wanted.discard(message.key)
            self._keep(message.key, message.checksum, bytearray(content[0] if content else b""))
            self._send(link.socket, Taken(message.name, [message.key]))
        elif isinstance(message, Done):
            receiving.is_complete = True
        elif isinstance(message, Gone):
            self._end(receiving, OF_ANOTHER_KIND if message.is_of_another_kind else "it is not there any more")
            return
        if receiving.is_complete and not receiving.wanted:
            self._end(receiving)

    def _greet(self, link: Link, message: Welcome) -> None:
        """The sender is there, and says how its outbox is reached."""
        if message.outbox and link.outbox is None:
            try:
                link.outbox = MappedOutbox(message.outbox, self.outbox.block_bytes)
            except OSError as error:
                logger.warning("the memory of another engine can't be mapped: %s", error)

    def _read(self, link: Link, slots: Sequence[int]) -> list[bytearray] | None:
        """The content of slots of the sender's outbox. None: it can't be read, and has to be asked for."""
        if self._encrypted is not None or link.outbox is None:
            return None
        return [link.outbox.read(slot) for slot in slots]

    def _take_blocks(self, link: Link, receiving: Receiving, message: Blocks) -> None:
        receiving.num_heard += len(message.entries)
        lacking = [entry for entry in message.entries if not (entry[0] in self.inbox or receiving.is_there(entry[0]))]
        contents = self._read(link, [slot for _, _, slot in lacking]) if lacking else []
        if contents is None:
            receiving.wanted.update(key for key, _, _ in lacking)
            self._send(link.socket, Want(message.name, [key for key, _, _ in lacking]))
        else:
            for (key, checksum, _), content in zip(lacking, contents):
                self._keep(key, checksum, content)
        taken = [key for key, _, _ in message.entries if key not in receiving.wanted]
        if taken:
            self._send(link.socket, Taken(message.name, taken))

    def _keep(self, key: bytes, checksum: bytes, content: bytearray) -> None:
        if len(content) == self.outbox.block_bytes and checksum_of(key, content) == checksum:
            self.inbox.put(key, content)
        else:
            self.num_bad_blocks += 1
            logger.warning("block %s of another engine is damaged, and is computed", key.hex())

    def _compare(self, told: Mapping[str, int]) -> None:
        """A connection that broke may have lost messages: what was told of has to come before the next beat."""
        for name, count in told.items():
            receiving = self._receiving.get(name)
            if receiving is None:
                continue
            if count > receiving.num_heard and receiving.is_behind:
                self._end(receiving, "messages were lost")
            else:
                receiving.is_behind = count > receiving.num_heard

    def _end(self, receiving: Receiving, problem: str = "") -> None:
        with self._receiving_lock:
            self._receiving.pop(receiving.name, None)
            self._received[receiving.name] = None
            while len(self._received) > MAX_OVER:
                self._received.popitem(last=False)
        if problem:
            logger.warning("blocks of the KV transfer %s are computed here: %s", receiving.name, problem)
        if not receiving.done.done():
            receiving.done.set_result(None)

    def _of_link(self, address: str, but: Receiving | None = None) -> list[Receiving]:
        with self._receiving_lock:
            return [one for one in self._receiving.values() if one.address == address and one is not but]

    # ---- the thread, at intervals ----

    def _beat(self, now: float, poller: zmq.Poller) -> None:
        for address, link in list(self._links.items()):
            current = self._of_link(address)
            if current:
                link.used = now
                self._send(link.socket, Alive())
            if now > link.heard + SECONDS_OF_SILENCE:
                for receiving in current:
                    self._end(receiving, "the engine that computes the prompt is silent")
            for receiving in current:
                if receiving.awaited_since is not None and now > receiving.awaited_since + SECONDS_OF_A_TRANSFER:
                    self._end(receiving, f"they have not come within {SECONDS_OF_A_TRANSFER:g} seconds")
            if now > link.used + SECONDS_OF_AN_IDLE_LINK:
                poller.unregister(link.socket)
                self._close_link(self._links.pop(address))

    def _close_link(self, link: Link) -> None:
        link.socket.close(linger=0)
        if link.outbox is not None:
            link.outbox.close()

    def _close_sockets(self) -> None:
        for receiving in list(self._receiving.values()):
            self._end(receiving)
        with self._lock:
            for link in self._links.values():
                self._close_link(link)
            self._links.clear()
            self._router.close(linger=0)
        if self._encrypted is not None:
            self._encrypted.close()
        else:
            assert self._context is not None
            self._context.term()
            with suppress(OSError):
                os.unlink(self.address.removeprefix(IPC))
        self._mailbox.close()
        self.outbox.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._mailbox.put(None)
            self._thread.join()
