"""Node 0's side of an engine's ranks on other hosts: waits for the hosts, hands them their ranks, and passes messages.

Each host has one connection, by which it sends what its workers answer. Both sides send a beat every second, and one
that has heard nothing for `SECONDS_OF_SILENCE` by its own clock ends its part of the engine run. node.py is the other
side.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any

import zmq

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError, ExplainedError
from ratoon.core.faults import fault_of
from ratoon.core.ranks import FromNode, NodeHello, NodeLaunch, ToNode
from ratoon.core.settings import values_of
from ratoon.core.wire import Buffer, Decoder, WireError, encode
from ratoon.distributed.cluster import EncryptedContext, Mailbox, keys_of_secret, new_keys, read_secret, resolve
from ratoon.distributed.local_ranks import RankMessages
from ratoon.observe.logging import get_logger
from ratoon.version import __version__

logger = get_logger(__name__)

SECONDS_BETWEEN_BEATS = 1.0
SECONDS_OF_SILENCE = 10.0
SECONDS_BETWEEN_REMINDERS = 30.0
RUN_BYTES = 8
# A host has these for itself
LOCAL_SETTINGS = (
    "node_rank",
    "master_addr",
    "master_port",
    "device",
    "num_threads",
    "cluster_secret_file",
    "measure_kernels",
    "executor",
)


class RemoteRanks:
    def __init__(self, config: EngineConfig, messages: RankMessages, engine: int) -> None:
        """Listens. Raises ConfigError where it can't."""
        self.address = resolve("master_addr", config.master_addr)
        self.keys = new_keys()
        self._config = config
        self._messages = messages
        self._launch = NodeLaunch(config, engine, self.keys)
        self._run = secrets.token_bytes(RUN_BYTES)
        self._context = EncryptedContext(keys_of_secret(read_secret(config)))
        try:
            self._socket, _ = self._context.listen(zmq.ROUTER, self.address, config.master_port)
        except zmq.ZMQError as error:
            self._context.close()
            problem = f"node 0 can't listen at {config.master_addr}:{config.master_port}: {error}"
            raise ConfigError(
                "master_addr", problem, "an address of this host, and a master_port that is free"
            ) from None
        self._mailbox = Mailbox()
        self._nodes: dict[int, bytes] = {}  # connections, by the node's rank
        self._last_heard: dict[int, float] = {}
        self._all_are_there = threading.Event()
        self._is_launched = False
        self._end: str | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="other-hosts", daemon=True)
        self._thread.start()

    # ---- for the executor's threads ----

    def wait_for_nodes(self) -> None:
        """Until every host is there. There is no limit: one that is started again may take long."""
        while not self._all_are_there.wait(SECONDS_BETWEEN_REMINDERS):
            missing = [str(node) for node in range(1, self._config.nnodes) if node not in self._nodes]
            logger.warning("waiting for node %s of %d", " and ".join(missing), self._config.nnodes)
        self._mailbox.put("launch")

    @property
    def end(self) -> str | None:
        return self._end

    def send(self, frames: list[Buffer], seconds: float) -> None:
        """Does not wait: what a host does not take makes it silent, which is noticed."""
        self._mailbox.put([ToNode.MESSAGE.value, self._run, *(bytes(frame) for frame in frames)])

    def kill(self) -> None:
        self._mailbox.put([ToNode.END.value, self._run])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._mailbox.put("close")
            self._thread.join()
            self._mailbox.close()
            self._context.close()

    # ---- the thread that has the socket ----

    def _work(self) -> None:
        try:
            self._pass_messages()
        except Exception as error:
            logger.exception("messages of other hosts can't be passed")
            self._lose(f"messages of other hosts can't be passed: {error}")

    def _pass_messages(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._mailbox.fileno, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            poller.poll(max(0, int(1000 * (next_beat - time.monotonic()))))
            for message in self._mailbox.take_all():
                if message == "close":
                    return
                if message == "launch":
                    self._hand_out_ranks()
                else:
                    self._send_all(message)
            while self._socket.poll(0):
                self._take(*self._socket.recv_multipart())
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + SECONDS_BETWEEN_BEATS
                self._send_all([ToNode.BEAT.value, self._run])
                self._look_for_silence()

    def _send(self, connection: bytes, frames: list[Any]) -> None:
        self._socket.send_multipart([connection, *frames])  # a connection that is gone: dropped

    def _send_all(self, frames: list[Any]) -> None:
        for connection in self._nodes.values():
            self._send(connection, frames)

    def _take(self, connection: bytes, *frames: bytes) -> None:
        if len(frames) < 2:
            return
        kind, run, *rest = frames
        if kind == FromNode.HELLO.value:
            self._greet(connection, rest)
            return
        if run != self._run:
            self._send(connection, [ToNode.END.value, run])  # an earlier run's: it may join this one
            return
        node = next((node for node, its in self._nodes.items() if its == connection), None)
        if node is None:  # a connection that was made again: messages may be lost
            self._send(connection, [ToNode.END.value, run])
            self._lose("the connection to another host was interrupted")
            return
        self._last_heard[node] = time.monotonic()
        if kind == FromNode.MESSAGE.value:
            self._messages.take(int.from_bytes(rest[0], "little"), list(rest[1:]))
        elif kind == FromNode.LOST.value:
            self._lose(rest[0].decode(errors="replace"))

    def _greet(self, connection: bytes, frames: list[bytes]) -> None:
        try:
            hello = Decoder(NodeHello).decode(frames)
            verify_hello(hello, self._config)
        except (WireError, ExplainedError) as error:
            logger.warning("a host was refused: %s", error)
            self._send(connection, [ToNode.REFUSE.value, self._run, *encode(fault_of(error))])
            return
        known = self._nodes.get(hello.node_rank)
        if known != connection and self._is_launched:
            self._lose(f"node {hello.node_rank} was started again")
            return
        if known != connection:
            logger.log(logging.INFO, "node %d of %d is there", hello.node_rank, hello.nnodes)
        self._nodes[hello.node_rank] = connection
        self._last_heard[hello.node_rank] = time.monotonic()
        if len(self._nodes) == self._config.nnodes - 1:
            self._all_are_there.set()

    def _hand_out_ranks(self) -> None:
        self._is_launched = True
        self._send_all([ToNode.LAUNCH.value, self._run, *encode(self._launch)])

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        silent = [node for node, heard in self._last_heard.items() if now - heard > SECONDS_OF_SILENCE]
        for node in silent:
            if self._is_launched:
                self._lose(f"node {node} has been silent for {SECONDS_OF_SILENCE:g} seconds")
            elif not self._all_are_there.is_set():  # it is waited for again
                del self._nodes[node], self._last_heard[node]

    def _lose(self, problem: str) -> None:
        self._end = self._end or problem
        self._messages.lost(problem)


def verify_hello(hello: NodeHello, config: EngineConfig) -> None:
    """Raises ConfigError for a host that is none of this engine's, or whose settings contradict node 0's."""
    if hello.version != __version__:
        raise ConfigError("version", f"the host has {hello.version}, and node 0 {__version__}", "the same on all hosts")
    if hello.nnodes != config.nnodes:
        raise ConfigError("nnodes", f"the host was given {hello.nnodes}, and node 0 {config.nnodes}", "the same number")
    if not 0 < hello.node_rank < config.nnodes:
        raise ConfigError("node_rank", f"{hello.node_rank} is no other host", f"1 to {config.nnodes - 1}")
    own = values_of(config)
    for name, given in hello.settings.items():
        if name not in LOCAL_SETTINGS and given != own.get(name):
            problem = f"the host was given {given!r}, and node 0 has {own.get(name)!r}"
            raise ConfigError(name, problem, "the same, or leave it out there: node 0's settings count")
