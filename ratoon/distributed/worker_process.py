"""A worker in a process of its own: a rank of one replica.

    main thread      ring → plans and calls → thread of the steps, in their order
    result thread    results of steps, in their order → socket
    lifeline thread  ends the process when standard input closes, that is when its parent is gone

The parent's side is multiproc.py. Run as `python -m ratoon.distributed.worker_process RING SIDE RESULTS MEETING`, which
are descriptors: the memory of the ring, its socket, the socket of results, and the file through which ranks find each
other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from ratoon.core.errors import StepSkippedError
from ratoon.core.faults import fault_of
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.processes import (
    continue_when_parent_dies,
    hold_lifeline,
    ignore_signals_of_the_group,
    name_process,
    read_launch,
)
from ratoon.core.ranks import CallResult, FromWorker, StepResult, ToWorker, WorkerLaunch
from ratoon.core.wire import Buffer, encode
from ratoon.core.worker import decode_call, encode_result
from ratoon.distributed.broadcast import RingReader, RingTimeoutError
from ratoon.distributed.collectives import join_group, leave_group
from ratoon.distributed.executor import StepHandle
from ratoon.distributed.frames import send_frames
from ratoon.distributed.host_links import HostLinks
from ratoon.distributed.plan_frames import PlanDecoder
from ratoon.distributed.uniproc import WorkerThread
from ratoon.execution.worker import Worker
from ratoon.observe.logging import configure_logging, get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

PHASES = ("choose", "load", "measure", "allocate", "warm_up")
MEETING = ("listen", "connect")  # before them, where ranks are on several hosts
SECONDS_BETWEEN_LOOKS = 3600.0  # without a message: the lifeline ends a process whose parent is gone


class MessageReader(Protocol):
    """Where the messages of the executor arrive: a RingReader, or the like."""

    def read(self, timeout: float) -> AbstractContextManager[list[Buffer]]:
        """The next message; its frames are valid within. RingTimeoutError: there was none for so long."""
        ...


class WorkerProcess:
    def __init__(
        self,
        launch: WorkerLaunch,
        ring: MessageReader,
        deliver: Callable[[Sequence[Buffer]], None],
        rendezvous: str,
    ) -> None:
        """`deliver` sends a message to the executor, from one thread at a time. OSError: the executor is gone. By
        `rendezvous` the ranks find each other (open_store in collectives.py)."""
        self._launch = launch
        self._rendezvous = rendezvous
        self._ring = ring
        self._deliver = deliver
        self._sending = threading.Lock()
        self._steps: queue.SimpleQueue[tuple[int, StepHandle] | None] = queue.SimpleQueue()
        self._worker: Worker | None = None
        self._thread: WorkerThread | None = None
        self._links = None if launch.keys is None else HostLinks(launch, launch.keys)

    def run(self) -> None:
        results = threading.Thread(target=self._send_results, name="results", daemon=True)
        results.start()
        plans = PlanDecoder()
        while True:
            try:
                with self._ring.read(SECONDS_BETWEEN_LOOKS) as (kind, *frames):
                    kind = bytes(kind)
            except RingTimeoutError:
                continue
            if kind == ToWorker.CLOSE.value:
                break
            if kind == ToWorker.CALL.value:
                number, *call = frames
                self._call(int.from_bytes(number, "little"), call)
                continue
            plan = plans.decode(frames)
            assert self._thread is not None
            self._steps.put((plan.step, self._thread.submit(plan)))
        self._steps.put(None)
        results.join()
        if self._thread is not None:
            self._thread.close()
        if self._links is not None:
            self._links.close()

    # ---- calls ----

    def _call(self, number: int, frames: Sequence[Buffer]) -> None:
        try:
            name, arguments = decode_call(frames)
            if name in MEETING:
                assert self._links is not None, "all ranks are on this host"
                self._answer(number, getattr(self._links, name)(*arguments))
                return
            if name in PHASES:
                self._answer(number, self._run_phase(name, arguments))
                return
            assert self._thread is not None
            future = self._thread.collective_rpc(name, *arguments)
        except Exception as error:
            logger.debug("a call failed", exc_info=True)
            self._answer_failure(number, error)
            return
        future.add_done_callback(lambda done: self._answer_later(number, done))

    def _run_phase(self, name: str, arguments: Sequence[Any]) -> Any:
        if self._worker is None:
            self._worker = self._make_worker()
        result = getattr(self._worker, name)(*arguments)
        if name == PHASES[-1]:
            self._thread = WorkerThread(self._worker)
        return result

    def _make_worker(self) -> Worker:
        from ratoon.models.build import open_tensors
        from ratoon.models.source import resolve_model

        launch = self._launch
        config = launch.config
        part = join_group(launch, self._rendezvous, self._links)
        source = resolve_model(config.model, config.hf_overrides, config.model_backend)
        return Worker(config, source.config, open_tensors(config, source), StartupTimer(), part)

    def _answer_later(self, number: int, done: Future[list[Any]]) -> None:
        error = done.exception()
        if error is not None:
            self._answer_failure(number, error)
        else:
            self._answer(number, done.result()[0])

    def _answer(self, number: int, result: Any) -> None:
        self._send(FromWorker.CALL, [*encode(CallResult(number)), *encode_result(result)])

    def _answer_failure(self, number: int, error: BaseException) -> None:
        self._send(FromWorker.CALL, encode(CallResult(number, fault_of(error))))

    # ---- results of steps ----

    def _send_results(self) -> None:
        while (step := self._steps.get()) is not None:
            number, handle = step
            result = StepResult(number)
            try:
                result.output = handle.result()
            except Exception as error:
                logger.debug("step %d failed", number, exc_info=True)
                result.fault, result.was_skipped = fault_of(error), isinstance(error, StepSkippedError)
            if not self._launch.has_results and result.output is not None:
                transfers = result.output.transfers
                if transfers is None or not transfers.num_fetched:
                    continue
                result.output = ModelRunnerOutput(transfers=transfers)  # the rest is told by another rank
            assert self._thread is not None
            result.stats = self._thread.stats if self._launch.has_results or result.fault is not None else None
            self._send(FromWorker.STEP, encode(result))

    def _send(self, kind: FromWorker, frames: Sequence[Buffer]) -> None:
        with self._sending, contextlib.suppress(OSError):  # the parent is gone, which the lifeline notices
            self._deliver([kind.value, *frames])


def main() -> int:
    ignore_signals_of_the_group()
    continue_when_parent_dies()
    ring, side, results, meeting = (int(argument) for argument in sys.argv[1:5])
    for descriptor in (ring, side, results, meeting):
        os.set_inheritable(descriptor, False)
    configure_logging()
    launch = read_launch(sys.stdin.buffer, WorkerLaunch)
    name_process(f"rank{launch.rank}@{launch.engine}")
    hold_lifeline()
    number = launch.rank - launch.first_rank
    reader = RingReader(ring, number, launch.num_local_ranks, socket.socket(fileno=side))
    deliver = partial(send_frames, socket.socket(fileno=results))
    WorkerProcess(launch, reader, deliver, f"/proc/self/fd/{meeting}").run()
    leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
