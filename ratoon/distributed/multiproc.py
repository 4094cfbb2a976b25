"""The executor whose workers are processes of this host, one for each rank.

Plans and calls are broadcast through a ring in shared memory; results come back through a socket from each worker. A
step's output is that of the first rank of the last stage: all ranks of a stage choose the same tokens, from logits that
all of them have. A worker that dies, or fails in a step which the others go through with, ends the executor: the engine
is started again, and its requests are replayed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from subprocess import TimeoutExpired
from typing import Any

import msgspec

from ratoon.core.config import EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError, DeviceLostError, EngineError, StepSkippedError
from ratoon.core.faults import error_of
from ratoon.core.machine import usable_cores
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.core.processes import start_process
from ratoon.core.ranks import CallResult, FromWorker, StepResult, ToWorker, WorkerLaunch, output_rank
from ratoon.core.wire import Buffer, Decoder
from ratoon.core.worker import WorkerFacts, WorkerStats, decode_result, encode_call
from ratoon.distributed.broadcast import RingTimeoutError, RingWriter
from ratoon.distributed.executor import bring_up
from ratoon.distributed.frames import receive_frames
from ratoon.distributed.plan_frames import encode_plan
from ratoon.layers.weights import TensorSource
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

SECONDS_OF_A_CALL = 600.0  # in which every worker must answer; loading weights is the longest
SECONDS_TO_TAKE_A_PLAN = 60.0
SECONDS_TO_END = 10.0
SECONDS_TO_NOTICE_A_DEATH = 1.0


class StepInFlight:
    """The handle of a step."""

    def __init__(self, result: Future[StepResult]) -> None:
        self._result = result

    def launch(self) -> None:
        """Steps are launched by the workers, which nothing here waits for."""

    def result(self) -> ModelRunnerOutput:
        result = self._result.result()
        if result.fault is not None:
            problem = result.fault.problem
            raise StepSkippedError(problem) if result.was_skipped else error_of(result.fault)
        assert result.output is not None
        return result.output


class PendingCall:
    """A call that workers are to answer."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.future: Future[list[Any]] = Future()
        self.results: dict[int, Any] = {}
        self.world_size = world_size

    @property
    def is_answered(self) -> bool:
        return len(self.results) == self.world_size

    def end(self) -> None:
        """All workers have answered."""
        errors = [found for found in self.results.values() if isinstance(found, Exception)]
        if self.future.set_running_or_notify_cancel():
            if errors:
                self.future.set_exception(errors[0])
            else:
                self.future.set_result([self.results[each] for each in range(self.world_size)])


class MultiprocExecutor:
    """One process for each of `tensor_parallel_size` × `pipeline_parallel_size` ranks."""

    facts: WorkerFacts

    def __init__(self, config: EngineConfig, model: ModelConfig, tensors: TensorSource, timer: StartupTimer) -> None:
        self.when_failed: Callable[[str], None] = lambda problem: None
        verify_stages(config, model)
        self._world_size = config.num_ranks
        self._output_rank = output_rank(config)
        self._stats = WorkerStats()
        self._lock = threading.Lock()  # of what follows
        self._steps: dict[int, Future[StepResult]] = {}
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        self._failure: str | None = None
        self._is_closing = False
        # A file without a name, through which ranks find each other: nothing is left of it, however processes end
        self._meeting = os.memfd_create("ratoon-meeting")
        self._ring = RingWriter(self._world_size)
        self._workers: list[Rank] = []
        try:
            for rank in range(self._world_size):
                self._workers.append(Rank(self, rank, place_rank(config, rank)))
            self._ring.close_sides()
            with timer.phase("bring up workers"):
                facts = bring_up(self._call_and_wait)
        except BaseException:
            self.close()
            raise
        self.facts = combine(facts)

    @property
    def stats(self) -> WorkerStats:
        return self._stats

    # ---- the interface of executors ----

    def submit(self, plan: SchedulerOutput) -> StepInFlight:
        future: Future[StepResult] = Future()
        with self._lock:
            self._raise_failure()
            self._steps[plan.step] = future
        self._broadcast([ToWorker.PLAN.value, *encode_plan(plan)])
        return StepInFlight(future)

    def collective_rpc(self, method: str, *arguments: Any) -> Future[list[Any]]:
        frames = encode_call(method, arguments)
        with self._lock:
            self._raise_failure()
            self._num_calls += 1
            number = self._num_calls
            call = self._calls[number] = PendingCall(method, self._world_size)
        self._broadcast([ToWorker.CALL.value, number.to_bytes(8, "little"), *frames])
        return call.future

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(EngineError):
            self._ring.write([ToWorker.CLOSE.value], 1.0)
        deadline = time.monotonic() + SECONDS_TO_END
        for worker in self._workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        self._ring.close()
        os.close(self._meeting)

    # ---- messages ----

    def _call_and_wait(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return self.collective_rpc(method, *arguments).result(SECONDS_OF_A_CALL)
        except TimeoutError:
            raise EngineError(f"a worker has not answered {method!r} within {SECONDS_OF_A_CALL:g} seconds") from None

    def _broadcast(self, frames: list[Buffer]) -> None:
        try:
            self._ring.write(frames, SECONDS_TO_TAKE_A_PLAN)
        except RingTimeoutError as error:
            self.fail(str(error))
            raise DeviceLostError(str(error)) from None

    def take_step(self, rank: int, result: StepResult) -> None:
        """Of a worker's thread: the result of a step."""
        if rank != self._output_rank or (result.fault is not None and self._world_size > 1 and not result.was_skipped):
            assert result.fault is not None
            # Behind the death of a rank the others fail as well, in the middle of a sum: the cause is what is told.
            ended = self._wait_for_death()
            self.fail(ended or f"worker {rank} failed in step {result.step}: {result.fault.problem}")
            return
        with self._lock:
            future = self._steps.pop(result.step, None)
            self._stats = result.stats or self._stats
        if future is not None:
            future.set_result(result)

    def take_answer(self, rank: int, number: int, result: Any) -> None:
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                return
            call.results[rank] = result
            if not call.is_answered:
                return
            del self._calls[number]
        call.end()  # without the lock: what waits for the call may make another one

    def name_of_call(self, number: int) -> str | None:
        with self._lock:
            call = self._calls.get(number)
            return None if call is None else call.name

    def fail(self, problem: str) -> None:
        """No step can be executed any more."""
        if self._is_closing:
            return
        with self._lock:
            if self._failure is not None:
                return
            self._failure = problem
            steps, self._steps = list(self._steps.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        logger.error("%s", problem)
        for worker in self._workers:  # first: the engine's process may end as soon as a step has failed
            worker.kill()
        futures: list[Future[Any]] = [*steps, *(call.future for call in calls)]
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # cancelled
                future.set_exception(DeviceLostError(problem))
        self.when_failed(problem)

    def _wait_for_death(self) -> str | None:
        """Which worker has ended, if one does so soon."""
        deadline = time.monotonic() + SECONDS_TO_NOTICE_A_DEATH
        while True:
            ended = next((worker.end for worker in self._workers if worker.end is not None), None)
            if ended is not None or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeviceLostError(self._failure)

    @property
    def ring(self) -> RingWriter:
        return self._ring

    @property
    def meeting(self) -> int:
        """The descriptor of the file through which ranks find each other."""
        return self._meeting

    @property
    def world_size(self) -> int:
        return self._world_size


class Rank:
    """A worker process, and the thread that reads its messages."""

    def __init__(self, executor: MultiprocExecutor, rank: int, config: EngineConfig) -> None:
        self._executor = executor
        self._rank = rank
        self._results, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ring = executor.ring
        descriptors = [ring.fileno, ring.sides[rank].fileno(), theirs.fileno(), executor.meeting]
        launch = WorkerLaunch(config, rank, executor.world_size, os.getpid())
        with theirs:
            self._process = start_process(
                "ratoon.distributed.worker_process", [str(each) for each in descriptors], descriptors, launch
            )
        self._thread = threading.Thread(target=self._read, name=f"worker-{rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        steps, answers = Decoder(StepResult), Decoder(CallResult)
        while (message := receive_frames(self._results)) is not None:
            kind, *frames = message
            if bytes(kind) == FromWorker.STEP.value:
                self._executor.take_step(self._rank, steps.decode(frames))
                continue
            answer = answers.decode(frames)
            name = self._executor.name_of_call(answer.number)
            if name is None:
                continue
            result = decode_result(name, frames[1:]) if answer.fault is None else error_of(answer.fault)
            self._executor.take_answer(self._rank, answer.number, result)
        self._executor.fail(self.end or f"worker {self._rank} has closed its socket")

    @property
    def end(self) -> str | None:
        """How it has ended; None: it runs."""
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


def verify_stages(config: EngineConfig, model: ModelConfig) -> None:
    if config.pipeline_parallel_size > model.num_layers:
        problem = f"{config.pipeline_parallel_size} stages can't be made of {model.num_layers} layers"
        raise ConfigError("pipeline_parallel_size", problem, f"at most {model.num_layers}")


def place_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The settings of a rank: given values are kept, defaults are divided among the ranks."""
    if config.num_ranks == 1:
        return config
    if config.num_threads is None:
        config = config.with_(num_threads=max(1, usable_cores() // config.num_ranks))
    if config.device in ("auto", "cuda"):
        import torch

        count = torch.cuda.device_count()
        if count:
            config = config.with_(device=f"cuda:{rank % count}")
        elif config.device == "auto":
            config = config.with_(device="cpu")
    return config


def combine(facts: list[WorkerFacts]) -> WorkerFacts:
    """The facts of all ranks as those of one executor."""
    first = facts[0]
    return msgspec.structs.replace(
        first,
        weight_bytes=sum(one.weight_bytes for one in facts),
        kv_bytes=sum(one.kv_bytes for one in facts),
        num_threads=sum(one.num_threads for one in facts),
    )
