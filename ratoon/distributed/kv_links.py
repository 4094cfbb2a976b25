"""How the processes of ranks reach the exchanges of their parts of blocks (kv_exchange.py), which are in the engine's
process: one socket for each rank, in a private folder of the engine.

    rank:  save   SAVE, key, part, …   →  engine: the outbox of this rank's exchange
           load   LOAD, number, key    →  engine: its inbox
                  number, content      ←  an empty content: the block is not there

The folder and the fingerprint, which no other rank has, say where a rank and its exchange meet, whichever of them is
there first. A rank ends with its engine, and an engine with its ranks: neither waits here for one that is gone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import zmq

from ratoon.core.kv import KVFingerprint
from ratoon.core.kv_connector import BlockMover
from ratoon.distributed.block_bytes import fill
from ratoon.distributed.cluster import Mailbox
from ratoon.distributed.kv_exchange import IPC, PeerExchange

logger = logging.getLogger(__name__)

SAVE, LOAD = b"save", b"load"
NUMBER_BYTES = 8
MAX_QUEUED = 64  # blocks on their way to the engine; the thread that saves waits then
SECONDS_WITHOUT_ANSWER = 5.0  # after which blocks that were asked for are computed
MILLISECONDS_TO_SEND_THE_REST = 1000


def address_of(folder: str, fingerprint: KVFingerprint) -> str:
    return f"{IPC}{folder}/{fingerprint.digest[:16]}"


class LinkedMover(BlockMover):
    """The worker's half, in the process of a rank. Saves and loads come on two threads: each has a socket."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._saving, self._loading = (self._context.socket(zmq.DEALER) for _ in range(2))
        for socket in (self._saving, self._loading):
            socket.linger = MILLISECONDS_TO_SEND_THE_REST
            socket.sndhwm = MAX_QUEUED
            socket.rcvhwm = 0
            socket.connect(address)
        self._number = 0

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self._saving.send_multipart([SAVE, key, *parts])  # a copy: the parts are valid during the call alone

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        (is_there,) = self.load_all([(key, parts)])
        return is_there

    def load_all(self, wanted: Sequence[tuple[bytes, Sequence[memoryview]]]) -> list[bool]:
        """Asks for all, and takes what comes. An answer that comes after this call has ended is not used."""
        found = [False] * len(wanted)
        first = self._number + 1
        self._number += len(wanted)
        num_asked = num_answered = 0
        while num_answered < len(wanted):
            while num_asked < len(wanted) and num_asked < num_answered + MAX_QUEUED:
                number = (first + num_asked).to_bytes(NUMBER_BYTES, "big")
                self._loading.send_multipart([LOAD, number, wanted[num_asked][0]])
                num_asked += 1
            if not self._loading.poll(int(1000 * SECONDS_WITHOUT_ANSWER)):
                logger.warning("the engine has not answered its rank for %g seconds", SECONDS_WITHOUT_ANSWER)
                break
            answered, content = self._loading.recv_multipart(copy=False)
            place = int.from_bytes(answered.bytes, "big") - first
            if place >= 0:
                num_answered += 1
                found[place] = fill(wanted[place][1], content.buffer)
        return found

    def close(self) -> None:
        self._saving.close()
        self._loading.close()
        self._context.term()


class RankLink:
    """The engine's end: a thread that hands blocks of one rank to its exchange, and gives it those that have come."""

    def __init__(self, exchange: PeerExchange, address: str) -> None:
        self._exchange = exchange
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._socket.rcvhwm = MAX_QUEUED
        self._socket.bind(address)
        self._mailbox = Mailbox()
        self._thread = threading.Thread(target=self._run, name="kv-rank-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._mailbox.fileno, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._mailbox.fileno in ready:
                return
            try:
                self._take(self._socket.recv_multipart(copy=False))
            except Exception:
                logger.exception("a message of a rank can't be answered")

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        identity, kind, *rest = frames
        if kind.bytes == SAVE:
            key, *parts = rest
            self._exchange.save(key.bytes, [part.buffer for part in parts])
        elif kind.bytes == LOAD:
            number, key = rest
            content = self._exchange.inbox.take(key.bytes)
            self._socket.send_multipart([identity, number, content or b""], copy=False)

    def close(self) -> None:
        if self._thread.is_alive():
            self._mailbox.put(None)
            self._thread.join()
            self._socket.close(linger=0)
            self._context.term()
            self._mailbox.close()
            with suppress(OSError):
                os.unlink(self._address.removeprefix(IPC))
