"""The worker processes of one host: a ring in shared memory through which all of them are reached, and a socket from
each."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from subprocess import TimeoutExpired
from typing import Protocol

from ratoon.core.config import EngineConfig
from ratoon.core.processes import start_process
from ratoon.core.ranks import LinkKeys, WorkerLaunch
from ratoon.core.wire import Buffer
from ratoon.distributed.broadcast import RingWriter
from ratoon.distributed.frames import receive_frames
from ratoon.distributed.placement import place_rank

SECONDS_TO_END = 10.0


class RankMessages(Protocol):
    """Takes the messages of workers, from several threads."""

    def take(self, rank: int, message: list[Buffer]) -> None: ...

    def lost(self, problem: str) -> None:
        """A worker has ended, or can't be reached: no step can be executed any more."""
        ...


class LocalRanks:
    def __init__(
        self,
        config: EngineConfig,
        ranks: range,
        messages: RankMessages,
        engine: int,
        address: str = "",
        keys: LinkKeys | None = None,
    ) -> None:
        """`engine`: the process that the workers belong to, for their names. `address`, `keys`: WorkerLaunch's."""
        # A file without a name, through which ranks find each other: nothing is left of it, however processes end
        self._meeting = os.memfd_create("ratoon-meeting")
        self._ring = RingWriter(len(ranks))
        self.workers: list[WorkerHandle] = []
        try:
            for number, rank in enumerate(ranks):
                placed = place_rank(config, number, len(ranks))
                launch = WorkerLaunch(placed, rank, ranks.start, len(ranks), engine, address, keys)
                self.workers.append(WorkerHandle(launch, self._ring, number, self._meeting, messages))
            self._ring.close_sides()
        except BaseException:
            self.kill()
            self.close(0.0)
            raise

    def send(self, frames: list[Buffer], seconds: float) -> None:
        """Sends a message to all workers. Raises RingTimeoutError."""
        self._ring.write(frames, seconds)

    @property
    def end(self) -> str | None:
        """Says how one of the workers has ended; None: all run."""
        return next((worker.end for worker in self.workers if worker.end is not None), None)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Ends those that have not ended by then."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        self._ring.close()
        os.close(self._meeting)


class WorkerHandle:
    """A worker process, and the thread that reads its messages."""

    def __init__(
        self, launch: WorkerLaunch, ring: RingWriter, number: int, meeting: int, messages: RankMessages
    ) -> None:
        """`number`: that of its side of the ring; `meeting`: the descriptor of the file in which ranks meet."""
        self._rank = launch.rank
        self._messages = messages
        self._results, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors = [ring.fileno, ring.sides[number].fileno(), theirs.fileno(), meeting]
        with theirs:
            self._process = start_process(
                "ratoon.distributed.worker_process", [str(each) for each in descriptors], descriptors, launch
            )
        self._thread = threading.Thread(target=self._read, name=f"worker-{launch.rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        while (message := receive_frames(self._results)) is not None:
            self._messages.take(self._rank, message)
        self._messages.lost(self.end or f"worker {self._rank} has closed its socket")

    @property
    def end(self) -> str | None:
        """Says how the worker has ended; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"worker {self._rank} has ended ({f'signal {-code}' if code < 0 else f'exit status {code}'})"

    def kill(self) -> None:
        self._process.kill()

    def close(self, seconds: float) -> None:
        assert self._process.stdin is not None
        try:
            self._process.wait(seconds)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._thread.join()
        self._results.close()
