"""Hosts of one engine under test: each a thread of this process with worker processes of its own, on loopback, with a
relay between it and node 0 that can be cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ratoon.core.errors import RatoonError
from ratoon.core.settings import engine_config
from ratoon.distributed import node as node_module
from ratoon.distributed import remote_ranks
from ratoon.distributed.cluster import SECRET_VARIABLE
from ratoon.distributed.node import Node

SECRET = "a secret of more than sixteen characters"


def beat_fast(monkeypatch: pytest.MonkeyPatch, silence: float = 10.0) -> None:
    """Hosts of this process notice a silence sooner, which a busy machine must not bring about."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    for module in (node_module, remote_ranks):
        monkeypatch.setattr(module, "SECONDS_BETWEEN_BEATS", 0.1)
        monkeypatch.setattr(module, "SECONDS_OF_SILENCE", silence)


class RunningNode:
    def __init__(self, folder: Path, port: int, **settings: Any) -> None:
        common = {"nnodes": 2, "node_rank": 1, "num_threads": 1, "device": "cpu"}
        self.node = Node(engine_config(str(folder), master_port=port, **(common | settings)))
        self.error: RatoonError | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.node.work()
        except RatoonError as error:
            self.error = error

    @property
    def pids(self) -> list[int]:
        ranks = self.node._ranks
        return [] if ranks is None else [worker.pid for worker in ranks.workers]

    def close(self) -> None:
        self.node.stop()
        self._thread.join()
        self.node.close()


@contextmanager
def running_node(folder: Path, port: int, **settings: Any) -> Iterator[RunningNode]:
    node = RunningNode(folder, port, **settings)
    try:
        yield node
    finally:
        node.close()


class Relay:
    """Passes bytes between a port of its own and another one, and keeps them. A connection that ends on one side, in
    order or by a reset, ends on the other one too. Cut, the relay passes nothing and closes nothing, as a network that
    loses packets for good; held, it passes later what has come, as one that loses some for a while."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self.seen = bytearray()
        self.is_cut = threading.Event()
        self._is_open = threading.Event()  # not held
        self._is_open.set()
        self._target = host, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(ours,), daemon=True).start()

    def _connect(self, ours: socket.socket) -> None:
        """Waits for a node 0 that is not there yet: a connection that was closed would look like a handshake that
        failed."""
        while True:
            try:
                theirs = socket.create_connection(self._target)
                break
            except OSError:
                time.sleep(0.05)
                if self._listener.fileno() < 0:
                    return
        self._sockets += [ours, theirs]
        for source, target in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # a reset: node 0 has closed with bytes unread
            while data := source.recv(1 << 16):
                self.seen += data
                self._is_open.wait()
                if not self.is_cut.is_set():
                    target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        self._is_open.clear()

    def release(self) -> None:
        self._is_open.set()

    def break_connections(self) -> None:
        """Ends all connections on both sides. New ones can be made."""
        broken, self._sockets = self._sockets, []
        for end in broken:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @property
    def num_connections(self) -> int:
        return len(self._sockets) // 2

    def close(self) -> None:
        self.release()
        for each in (self._listener, *self._sockets):
            each.close()
