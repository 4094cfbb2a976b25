"""A worker as an actor of a Ray cluster: a rank of one replica.

It is the worker of worker_process.py with another way to and from it. Messages are lists of frames, which are bytes:
nothing of ours is pickled. Ray may execute calls of an actor with several threads in another order than they were made,
so messages are numbered.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec

from ratoon.core.prepared import prepared
from ratoon.core.ranks import WorkerLaunch
from ratoon.core.wire import Buffer
from ratoon.distributed.broadcast import RingTimeoutError
from ratoon.distributed.collectives import TCP, leave_group
from ratoon.distributed.worker_process import WorkerProcess

SECONDS_OF_A_CALL = 10.0  # after which a call that waits for messages returns without one
THREADS = {"to_worker": 1, "from_worker": 1}  # of the actor, by groups of its methods


class Inbox:
    """Messages to the worker, read in the order of their numbers."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: dict[int, list[bytes]] = {}
        self._next = 0

    def put(self, number: int, frames: list[bytes]) -> None:
        with self._arrived:
            self._messages[number] = frames
            self._arrived.notify()

    @contextlib.contextmanager
    def read(self, seconds: float) -> Iterator[list[Buffer]]:
        """Reads the next message, as RingReader.read does."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._next in self._messages, seconds):
                raise RingTimeoutError(f"no message within {seconds:g} seconds")
            frames = self._messages.pop(self._next)
            self._next += 1
        yield list(frames)


class RankActor:
    """The actor. `put` and `take` are called at the same time; each has a thread."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._messages: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()

    def rendezvous(self) -> str:
        """An address of this node by which ranks can find each other. Its port is free now; if another process takes it
        before this rank does, the ranks do not meet, and the engine is started again."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"

    def start(self, launch: bytes, rendezvous: str) -> None:
        """`rendezvous` is the address of the first rank; empty: there is one."""
        message = msgspec.msgpack.decode(launch, type=prepared(WorkerLaunch))
        worker = WorkerProcess(message, self._inbox, self._deliver, rendezvous)
        threading.Thread(target=self._run, args=(worker,), name="worker", daemon=True).start()

    def _run(self, worker: WorkerProcess) -> None:
        try:
            worker.run()
            leave_group()
        finally:
            self._messages.put(None)

    def _deliver(self, frames: Sequence[Buffer]) -> None:
        self._messages.put([bytes(frame) for frame in frames])

    def put(self, number: int, frames: list[bytes]) -> None:
        self._inbox.put(number, frames)

    def take(self) -> list[list[bytes]] | None:
        """The messages of the worker since the last call, perhaps none. None: it has ended."""
        found: list[list[bytes]] = []
        with contextlib.suppress(queue.Empty):
            message = self._messages.get(timeout=SECONDS_OF_A_CALL)
            while message is not None:
                found.append(message)
                message = self._messages.get_nowait()
            if not found:
                return None
            self._messages.put(None)  # for the next call
        return found
