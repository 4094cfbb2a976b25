"""A host that runs ranks for the engine of another one: joins node 0, starts workers, and passes their messages.

When the engine run ends, by node 0's word, by its silence or because a worker is gone, the workers are ended and the
host joins again: node 0's next run gets it back without anything being done here. remote_ranks.py is the other side.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ratoon.core.config import EngineConfig
from ratoon.core.errors import ConfigError
from ratoon.core.faults import error_of
from ratoon.core.messages import Fault
from ratoon.core.ranks import FromNode, NodeHello, NodeLaunch, ToNode, ToWorker, ranks_of_node
from ratoon.core.settings import changed_values
from ratoon.core.wire import Buffer, Decoder, encode
from ratoon.distributed.broadcast import RingTimeoutError
from ratoon.distributed.cluster import (
    EncryptedContext,
    Mailbox,
    address_towards,
    in_url,
    keys_of_secret,
    read_secret,
    resolve,
)
from ratoon.distributed.local_ranks import LocalRanks
from ratoon.distributed.remote_ranks import RUN_BYTES, SECONDS_BETWEEN_BEATS, SECONDS_OF_SILENCE
from ratoon.observe.logging import get_logger
from ratoon.version import __version__

logger = get_logger(__name__)

NO_RUN = bytes(RUN_BYTES)
FAILED_HANDSHAKES = 3  # in a row, after which the secret is taken to be another one
SECONDS_TO_TAKE_A_PLAN = 60.0


class Node:
    def __init__(self, config: EngineConfig) -> None:
        """Connects to node 0, which need not be there yet. Raises ConfigError."""
        self._config = config
        master = resolve("master_addr", config.master_addr)
        self.address = address_towards(master, config.master_port)
        self._context = EncryptedContext(keys_of_secret(read_secret(config)))
        self._socket = self._context.connect(zmq.DEALER, f"tcp://{in_url(master)}:{config.master_port}")
        self._socket.immediate = True  # nothing is queued for a node 0 that is not there
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._num_failed_handshakes = 0
        self._mailbox = Mailbox()  # of what workers send
        self._run = NO_RUN
        self._ranks: LocalRanks | None = None
        self._last_heard = time.monotonic()
        self._is_stopped = False

    # ---- messages of workers, on the threads that read them ----

    def take(self, rank: int, message: list[Buffer]) -> None:
        frames = [bytes(frame) for frame in message]
        self._mailbox.put([FromNode.MESSAGE.value, self._run, rank.to_bytes(4, "little"), *frames])

    def lost(self, problem: str) -> None:
        self._mailbox.put([FromNode.LOST.value, self._run, problem.encode()])

    # ---- the loop ----

    def work(self) -> None:
        """Until `stop`. Raises RatoonError if node 0 refuses this host."""
        poller = zmq.Poller()
        for source in (self._socket, self._events, self._mailbox.fileno):
            poller.register(source, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._is_stopped:
            poller.poll(max(0, int(1000 * (next_beat - time.monotonic()))))
            while self._events.poll(0):
                self._note_handshake(recv_monitor_message(self._events)["event"])
            for frames in self._mailbox.take_all():
                self._pass_on(frames)
            while self._socket.poll(0):
                kind, run, *rest = self._socket.recv_multipart()
                self._take(kind, run, rest)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + SECONDS_BETWEEN_BEATS
                self._beat()

    def stop(self) -> None:
        """Ends `work`; from any thread, or from a signal's handler."""
        self._is_stopped = True
        self._mailbox.put([FromNode.BEAT.value, self._run])

    def _beat(self) -> None:
        if self._ranks is None:
            config = self._config
            hello = NodeHello(__version__, config.node_rank, config.nnodes, changed_values(config))
            self._send([FromNode.HELLO.value, NO_RUN, *encode(hello)])
            return
        self._send([FromNode.BEAT.value, self._run])
        if time.monotonic() - self._last_heard > SECONDS_OF_SILENCE:
            self._end_run(f"node 0 has been silent for {SECONDS_OF_SILENCE:g} seconds")

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # node 0 is not there, which its silence tells
            logger.debug("node 0 can't be reached")

    def _pass_on(self, frames: list[Any]) -> None:
        if frames[1] != self._run:  # of an earlier run
            return
        self._send(frames)
        if frames[0] == FromNode.LOST.value:
            self._end_run(frames[2].decode())

    def _take(self, kind: bytes, run: bytes, rest: list[bytes]) -> None:
        if kind == ToNode.REFUSE.value:
            raise error_of(Decoder(Fault).decode(rest))
        if kind == ToNode.LAUNCH.value and self._ranks is None:
            self._begin_run(run, Decoder(NodeLaunch).decode(rest))
        if run != self._run:
            return
        self._last_heard = time.monotonic()
        if kind == ToNode.END.value:
            self._end_run("the engine has ended this run")
        elif kind == ToNode.MESSAGE.value and rest[0] == ToWorker.CLOSE.value:
            self._end_run("the engine has ended", softly=True)
        elif kind == ToNode.MESSAGE.value and self._ranks is not None:
            try:
                self._ranks.send(list(rest), SECONDS_TO_TAKE_A_PLAN)
            except RingTimeoutError as error:
                self.lost(str(error))

    # ---- runs ----

    def _begin_run(self, run: bytes, launch: NodeLaunch) -> None:
        own = self._config
        config = launch.config.with_(model=own.model, node_rank=own.node_rank)
        if own.device != "auto":
            config = config.with_(device=own.device)
        config = config.with_(num_threads=own.num_threads or launch.config.num_threads)
        ranks = ranks_of_node(config, own.node_rank)
        logger.info("node %d runs ranks %d to %d", own.node_rank, ranks.start, ranks.stop - 1)
        self._run, self._last_heard = run, time.monotonic()
        try:
            self._ranks = LocalRanks(config, ranks, self, launch.engine, self.address, launch.keys)
        except (OSError, ConfigError) as error:
            logger.exception("the ranks of this host can't be started")
            self._send([FromNode.LOST.value, run, f"node {own.node_rank} can't start its ranks: {error}".encode()])
            self._run = NO_RUN

    def _end_run(self, reason: str, softly: bool = False) -> None:
        ranks, self._ranks, self._run = self._ranks, None, NO_RUN
        if ranks is None:
            return
        logger.warning("the ranks of this host are ended: %s", reason)
        if softly:
            ranks.send([ToWorker.CLOSE.value], 1.0)
        else:
            ranks.kill()
        ranks.close()

    def _note_handshake(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_failed_handshakes = 0
            return
        self._num_failed_handshakes += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or self._num_failed_handshakes >= FAILED_HANDSHAKES:
            where = f"{self._config.master_addr}:{self._config.master_port}"
            raise ConfigError("cluster secret", f"node 0 at {where} does not have this one", "the same on all hosts")

    def close(self) -> None:
        self._end_run("this host ends")
        self._socket.disable_monitor()
        self._context.close()
        self._mailbox.close()


def run_node(config: EngineConfig) -> None:
    """Runs the ranks of a host other than node 0 until SIGINT or SIGTERM. Raises RatoonError."""
    node = Node(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: node.stop())
    try:
        node.work()
    finally:
        node.close()
